"""Hidden states are written shard by shard: killed, or on a full disk, the work goes on where it
was, and ends in the same bytes."""

from __future__ import annotations

import errno
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.data.row_facts import check_rows
from medusa_heads.training.hidden import prepare
from medusa_heads.training.hidden.cache_setup import parts_of
from medusa_heads.training.hidden.cached_rows import row_name
from medusa_heads.training.hidden.layout import Index
from medusa_heads.training.hidden.prepare import Forwards, Part, write_parts
from medusa_heads.training.hidden.store import HiddenCache
from tests.killed import dies

SMALL = 20 * 16 * 4 * 4  # about a batch of states


class Writing:
    """Writes the states of the texts into a folder."""

    def __init__(self, target: TargetModel, texts: tuple[Dataset, Dataset], place: Path) -> None:
        self.target, self.place = target, place
        facts = [check_rows(part, target, name="set", heads_reached=1) for part in texts]
        self.data = TrainingData(texts[0], texts[1], texts[0], facts[0], facts[1], [])

    def parts(self, name: str, batch: int = 4) -> list[Part]:
        values = OptimisationArguments(
            output_dir=str(self.place),
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=2,
            training_args={"use_cpu": True},
        )
        args = to_training_arguments(values, "shared")
        cache = CacheArguments("auto", str(self.place / name))
        return parts_of(cache, self.target, self.data, HeadsConfig(num_heads=2), args, "weights")

    def __call__(self, name: str, batch: int = 4) -> None:
        write_parts(self.target, self.parts(name, batch))

    def bytes(self, name: str) -> dict[str, bytes]:
        """Of all files, hidden ones too."""
        files = [path for path in (self.place / name).rglob("*") if path.is_file()]
        return {str(path.relative_to(self.place / name)): path.read_bytes() for path in files}


@pytest.fixture
def writing(
    target: TargetModel,
    texts: tuple[Dataset, Dataset],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Writing:
    monkeypatch.setattr(prepare, "SHARD_BYTES", SMALL)
    return Writing(target, texts, tmp_path)


def test_killed_at_any_rename_it_goes_on_to_the_same_bytes(writing: Writing) -> None:
    writing("whole")
    whole = writing.bytes("whole")
    assert len(whole) == 5 + 2 + 2
    kills, before = 0, 0
    while dies(lambda: writing("killed"), renames=1):
        kills += 1
        left = writing.bytes("killed")
        states = {name for name in left if name.endswith(".states") and ".part" not in name}
        assert states <= set(whole) and all(left[name] == whole[name] for name in states)
        assert len(states) >= before, "what was written stays"
        before = len(states)
        with pytest.raises(ValueError, match=r"no index|not complete|no such|holds no"):
            for part in writing.parts("killed"):
                HiddenCache(part.folder, part.key)
    assert kills > 7
    assert writing.bytes("killed") == whole


def test_another_engine_goes_on_with_nothing_that_was_begun(writing: Writing) -> None:
    class Elsewhere(Forwards):
        computed_by = "vLLM 9.9"
        whole_shards = True

    def write(name: str, by: Forwards | None = None) -> list[Part]:
        parts = writing.parts(name)
        write_parts(writing.target, parts, forwards=by)
        return parts

    own = writing.bytes("own") if write("own") else {}
    part = write("other", Elsewhere(writing.target))[0]
    cache = HiddenCache(part.folder, part.key)
    assert cache.index.layout.computed_by == "vLLM 9.9"
    assert set(writing.bytes("other")) == set(own) and writing.bytes("other") != own
    assert write("other")  # what is whole, is there, whoever computed it
    shard = next(part.folder.glob("*.states"))
    shard.unlink()
    with pytest.raises(ValueError, match=r"begun by vLLM 9\.9, and the target's own"):
        write("other")
    write("other", Elsewhere(writing.target))
    assert shard.exists()


def test_a_full_disk_keeps_what_was_written(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing("whole")
    whole = writing.bytes("whole")
    write, said = prepare.write_shard, writing.place / "said"

    def until_full() -> None:
        written: list[int] = []

        def bounded(folder: Path, index: Index, shard: int, rows: Any) -> None:
            if len(written) == 3:  # from here on the system refuses longer files
                resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
            write(folder, index, shard, rows)
            written.append(shard)

        monkeypatch.setattr(prepare, "write_shard", bounded)
        try:
            writing("full")
        except OSError as error:
            said.write_text(str(error.errno))

    assert not dies(until_full)
    assert int(said.read_text()) == errno.EFBIG
    left = writing.bytes("full")
    states = {name: content for name, content in left.items() if name.endswith(".states")}
    assert len(states) == 3 and states.items() <= whole.items()
    assert not any(".part" in name for name in left)
    writing("full")
    assert writing.bytes("full") == whole


def test_progress_is_told_by_rows(
    writing: Writing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "tqdm", partial(prepare.tqdm, mininterval=0))
    parts = writing.parts("states")
    write_parts(writing.target, parts)  # a shard for each set
    told, rows = capsys.readouterr().err, len(parts[0].rows)
    assert f"0/{rows} " in told and f"4/{rows} " in told  # a batch further


def test_only_what_is_missing_is_computed(
    writing: Writing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writing("states")
    whole = writing.bytes("states")
    paths = sorted((writing.place / "states").rglob("*.states"))
    paths[0].unlink()
    os.truncate(paths[1], 100)
    written, write = [], prepare.write_shard

    def noted(*given: Any) -> None:
        written.append(given[2])
        write(*given)

    monkeypatch.setattr(prepare, "write_shard", noted)
    writing("states", batch=3)  # goes on in the batches that it was begun with
    assert len(written) == 2 and writing.bytes("states") == whole
    assert str(paths[1]) in caplog.text and "it is written anew" in caplog.text


def test_a_damaged_index_is_written_anew(
    writing: Writing, caplog: pytest.LogCaptureFixture
) -> None:
    writing("states")
    whole = writing.bytes("states")
    for path in (writing.place / "states").rglob("index.bin"):
        path.write_bytes(b"")
    writing("states")
    assert writing.bytes("states") == whole and "it is written anew" in caplog.text


@pytest.mark.parametrize("array", ["starts", "names", "places", "checks"])
def test_damage_behind_the_header_of_an_index_is_mended(
    array: str, writing: Writing, caplog: pytest.LogCaptureFixture
) -> None:
    writing("states")
    whole = writing.bytes("states")
    folder = writing.parts("states")[0].folder
    content, values = (folder / "index.bin").read_bytes(), getattr(Index.read(folder), array)
    assert content.count(values.tobytes()) == 1
    damaged = bytes([values.tobytes()[0] ^ 4]) + values.tobytes()[1:]
    (folder / "index.bin").write_bytes(content.replace(values.tobytes(), damaged))
    writing("states")
    assert writing.bytes("states") == whole and "its arrays are damaged" in caplog.text


def test_a_batch_that_did_not_fit_is_not_asked_of_the_next_run(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = writing.target.hidden

    def bounded(*inputs: Any) -> Any:
        if len(inputs[0]) > 4:
            raise torch.OutOfMemoryError("the batch is too large")
        return hidden(*inputs)

    monkeypatch.setattr(writing.target, "hidden", bounded)
    with pytest.raises(torch.OutOfMemoryError):
        writing("states", batch=8)
    writing("states", batch=4)
    writing("whole", batch=4)
    assert writing.bytes("states") == writing.bytes("whole")


def test_rows_lie_in_the_order_of_the_first_pass(writing: Writing) -> None:
    writing("states")
    part = writing.parts("states")[0]
    index = Index.read(part.folder)
    assert index.layout.seed == part.seed is not None
    assert index.layout.rows_per_shard % index.layout.batch_size == 0
    cache, order = HiddenCache(part.folder, part.key), index.layout.order()
    for place, row in enumerate(order.tolist()):
        name = row_name(part.rows[row], "learnt")
        found = cache.read(name)
        assert found is not None and torch.equal(found, cache.read_place(place))


def test_states_that_are_not_finite_are_refused(writing: Writing) -> None:
    with torch.no_grad():
        writing.target.get_input_embeddings().weight[7, 3] = torch.inf
    with pytest.raises(ValueError, match=r"not finite in torch\.float32: load it in another"):
        writing("states")
