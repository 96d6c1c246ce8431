"""Training from the cache: the same weights, without the target; and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import get_worker_info

from medusa_heads.config import HeadsConfig
from medusa_heads.target import TargetModel
from medusa_heads.training import hidden_states
from medusa_heads.training.arguments import OptimisationArguments, to_training_arguments
from medusa_heads.training.cache_arguments import CacheArguments
from medusa_heads.training.loss_config import LossConfig
from medusa_heads.training.packing import pack_rows
from medusa_heads.training.train import train_heads

Rows = Callable[..., Dataset]

SHAPES = {
    "medusa": HeadsConfig(num_heads=2),
    "own matrices": HeadsConfig(num_heads=2, vocab_matrix="own"),
    "hydra": HeadsConfig(kind="hydra", num_heads=2),
    "prefix": HeadsConfig(kind="hydra", num_heads=2, prefix_attention=True),
}


@pytest.fixture
def texts(make_rows: Rows) -> tuple[Dataset, Dataset]:
    """Rows of unequal lengths, with prompts; one has two answers, one learns nothing."""
    rows = [*make_rows(9), *make_rows(6, length=40, prompt=20, seed=1)]
    rows += make_rows(2, length=5, prompt=5, seed=2)
    rows[3]["labels"][9:15] = [-100] * 6
    return Dataset.from_list(rows), Dataset.from_list([*make_rows(3, seed=7), *make_rows(2, 33)])


class Runs:
    """Runs of the same training with different caches."""

    def __init__(self, target: TargetModel, texts: tuple[Dataset, Dataset], folder: Path) -> None:
        self.target = target
        self.texts = texts
        self.folder = folder
        self.shape = SHAPES["medusa"]
        self.objective: LossConfig | None = None
        self.forwards = 0
        self.count = 0
        hidden = target.hidden

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            self.forwards += 1
            return hidden(*args, **kwargs)

        target.hidden = counted  # type: ignore[method-assign]

    def __call__(self, mode: str, output: str | None = None, **changed: Any) -> dict[str, Tensor]:
        """The trained weights; `forwards` says how often the target ran."""
        self.count += 1
        self.forwards = 0
        output = output or f"run{self.count}"
        resume = changed.pop("resume", None)
        further = {"use_cpu": True, "disable_tqdm": True, **changed.pop("further", {})}
        values = {
            "output_dir": str(self.folder / output),
            "num_train_epochs": 1,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 2,
            "learning_rate": 2e-2,
            "training_args": further,
        }
        cache_dir = None if mode == "off" else str(self.folder / "cache")
        heads = train_heads(
            self.target,
            self.texts[0],
            eval_dataset=self.texts[1],
            config=self.shape,
            objective=self.objective,
            output_dir=self.folder / output,
            training_args=to_training_arguments(
                OptimisationArguments(**{**values, **changed}), self.shape.vocab_matrix
            ),
            hidden_cache=CacheArguments(mode, cache_dir),  # type: ignore[arg-type]
            resume_from_checkpoint=resume,
        )
        metrics = json.loads((self.folder / output / "metrics.json").read_text())
        self.eval_loss = metrics["eval_loss"]
        return heads.state_dict()

    def shards(self) -> list[Path]:
        return sorted((self.folder / "cache").glob("*/*.safetensors"))


@pytest.fixture
def runs(target: TargetModel, texts: tuple[Dataset, Dataset], tmp_path: Path) -> Runs:
    return Runs(target, texts, tmp_path)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_bitwise_the_same_and_the_target_does_not_run(shape: str, runs: Runs) -> None:
    runs.shape = SHAPES[shape]
    plain = runs("off")
    plain_loss = runs.eval_loss
    for mode in ("write", "auto", "read"):
        assert same(plain, runs(mode)), mode
        assert runs.eval_loss == plain_loss
        assert runs.forwards == {"write": 5 + 3 + 1, "auto": 1, "read": 0}[mode]


@pytest.mark.parametrize("head_weights", ["decay", "acceptance"])
def test_the_target_teaches_from_the_cache(head_weights: Any, runs: Runs) -> None:
    runs.objective = LossConfig({"forward_kl": 1.0, "acceptance": 0.5}, head_weights=head_weights)
    plain = runs("off")
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    assert runs.forwards == 0


def test_from_the_second_epoch_the_target_does_not_run(runs: Runs) -> None:
    three: dict[str, Any] = {"num_train_epochs": 3}
    plain = runs("off", **three)
    assert runs.forwards == 3 * (5 + 3) + 3 + 1
    for mode in ("write", "auto"):
        shutil.rmtree(runs.folder / "cache", ignore_errors=True)
        cached = runs(mode, **three)
        assert runs.forwards == 5 + 3 + 1  # batches of both sets once, and a token for the dtype
        for name, tensor in plain.items():
            torch.testing.assert_close(cached[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_bf16_target_is_kept_in_bf16(runs: Runs) -> None:
    runs.target.model.to(torch.bfloat16)  # type: ignore[arg-type]
    plain = runs("off")
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    indexes = [json.loads(path.read_text()) for path in runs.folder.glob("cache/*/index.json")]
    assert [index["dtype"] for index in indexes] == ["bfloat16"] * 2
    kept = sum(index["kept_positions"] for index in indexes)
    assert kept == 9 * 20 - 6 + 6 * 20 + 3 * 20 + 2 * 29
    size = sum(path.stat().st_size for path in runs.shards())
    assert 0 < size - kept * 16 * 2 < 8192  # a header for each shard


def test_other_batches_and_orders_find_the_same_rows(runs: Runs) -> None:
    runs("auto")
    plain = runs("off", per_device_train_batch_size=3, seed=5)
    cached = runs("read", per_device_train_batch_size=3, seed=5)
    for name, tensor in plain.items():
        torch.testing.assert_close(cached[name], tensor, rtol=1e-4, atol=1e-5)


def test_packed_rows(runs: Runs) -> None:
    from medusa_heads.training.data import TrainingData
    from medusa_heads.training.row_facts import check_rows

    known, held_out = runs.texts
    facts = check_rows(known, runs.target, name="set", heads_reached=1)
    data = TrainingData(pack_rows(known, 48), held_out, known, facts, facts, [])
    runs.texts = (data, held_out)
    runs.objective = LossConfig({"cross_entropy": 0.5, "forward_kl": 0.5})
    plain = runs("off")
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    assert runs.forwards == 0


def test_workers_read_ahead(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runs("off")
    assert same(plain, runs("auto", further={"dataloader_num_workers": 2}))
    assert runs.forwards == 5 + 3 + 1
    read, by_main = hidden_states.read_batch, []

    def watched(*args: Any) -> Any:
        if get_worker_info() is None:
            by_main.append(args)
        return read(*args)

    monkeypatch.setattr(hidden_states, "read_batch", watched)
    assert same(plain, runs("read", further={"dataloader_num_workers": 2}))
    assert len(by_main) == 1  # the calibration, which has no data loader


def test_an_interrupted_run_leaves_what_it_wrote(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = runs("off")
    hidden, after = runs.target.hidden, 4

    def interrupted(*args: Any, **kwargs: Any) -> Tensor:
        if runs.forwards == after:
            raise KeyboardInterrupt
        return hidden(*args, **kwargs)

    monkeypatch.setattr(runs.target, "hidden", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs("write")
    monkeypatch.setattr(runs.target, "hidden", hidden)
    assert len(runs.shards()) == 1
    with pytest.raises(ValueError, match=r"lacks 4 of 15 rows: fill it with hidden_cache auto"):
        runs("read")
    assert same(plain, runs("auto"))
    assert runs.forwards == (5 + 3 + 1) - (after - 1)
    assert same(plain, runs("read"))


def test_write_begins_anew_but_not_where_a_run_is_resumed(runs: Runs) -> None:
    runs("auto")
    before = runs.shards()
    whole = runs("write", output="kept", save_steps=2, save_total_limit=None)
    assert not set(before) & set(runs.shards()) and runs.forwards == 5 + 3 + 1
    shutil.rmtree(runs.folder / "kept" / "checkpoint-5")
    shutil.rmtree(runs.folder / "kept" / "checkpoint-4")
    before = runs.shards()
    resumed = runs("write", output="kept", save_steps=2, save_total_limit=None, resume="last")
    assert same(whole, resumed) and runs.shards() == before and runs.forwards == 1


def test_damage_is_named_by_read_and_mended_by_auto(runs: Runs) -> None:
    plain = runs("auto")
    damaged = runs.shards()[0]
    os.truncate(damaged, damaged.stat().st_size // 2)
    with pytest.raises(ValueError) as caught:
        runs("read")
    assert str(damaged) in str(caught.value) and "write it again" in str(caught.value)
    assert same(plain, runs("auto")) and runs.forwards > 1
    assert same(plain, runs("read"))


def test_another_target_text_or_kind_is_another_cache(runs: Runs) -> None:
    with pytest.raises(ValueError, match="holds no hidden states of this target and text: write"):
        runs("read")
    runs("auto")
    runs.shape = SHAPES["prefix"]
    with pytest.raises(ValueError, match=r"differs in positions and rows_sha256\): write them"):
        runs("read")
    runs.shape = SHAPES["medusa"]
    runs.texts = (runs.texts[0].select(range(10)), runs.texts[1])
    with pytest.raises(ValueError, match=r"differs in rows_sha256\)"):
        runs("read")
    with torch.no_grad():
        next(runs.target.model.parameters())[0, 0] += 1
    runs.texts = (runs.texts[0], runs.texts[0])
    with pytest.raises(ValueError, match=r"differs in target_weights_sha256 and rows_sha256\)"):
        runs("read")


def test_settings_of_the_forward_count_and_where_it_was_loaded_from_does_not(runs: Runs) -> None:
    runs("auto")
    config = runs.target.model.config
    config._name_or_path = "elsewhere"
    runs("read")
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 500.0}
    with pytest.raises(ValueError, match=r"differs in target_settings_sha256\)"):
        runs("read")


def test_the_size_is_said_and_a_small_disk_refused(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    kept = 9 * 20 - 6 + 6 * 20 + 3 * 20 + 2 * 29
    disk(kept * 16 * 4 - 1)
    with pytest.raises(ValueError, match=r"of 20 rows take 26\.4 kB and .* has 26\.4 kB free"):
        runs("auto")
    assert not (runs.folder / "cache").exists()
    disk(kept * 16 * 4)
    runs("auto")
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("Hidden states: 0 B in") and "about 26.4 kB to be written" in line
    disk(0)
    runs("auto")
    assert "26.4 kB in" in capsys.readouterr().out
    shutil.rmtree(runs.folder / "cache")
    # A short run needs no room for rows that it never sees.
    disk(round(kept * 16 * 4 * 0.9))
    runs("auto", max_steps=1)
    with pytest.raises(ValueError, match="give a hidden_cache_dir on a larger disk"):
        runs("write", num_train_epochs=2)


def test_hidden_states_that_are_not_finite_are_refused(runs: Runs) -> None:
    with torch.no_grad():
        runs.target.get_input_embeddings().weight[7, 3] = torch.inf
    with pytest.raises(ValueError, match=r"not finite in torch\.float32: load it in another"):
        runs("auto")
    assert not runs.shards()


def test_a_stream_is_refused(runs: Runs, make_rows: Rows) -> None:
    stream = IterableDataset.from_generator(lambda: iter(make_rows(8)))
    runs.texts = (stream, runs.texts[1])
    with pytest.raises(ValueError, match="which a stream does not: leave streaming or hidden_c"):
        runs("auto", max_steps=1)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="hidden_cache must be one of"):
        CacheArguments("on")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden_cache_dir is given but hidden_cache is off"):
        CacheArguments(hidden_cache_dir="somewhere")


PROCESSES = """
import sys
from pathlib import Path

import torch
from datasets import load_from_disk
from transformers import LlamaForCausalLM

from medusa_heads.config import HeadsConfig
from medusa_heads.target import TargetModel
from medusa_heads.training.arguments import OptimisationArguments, to_training_arguments
from medusa_heads.training.cache_arguments import CacheArguments
from medusa_heads.training.train import train_heads

folder = Path(sys.argv[1])
torch.set_num_threads(1)
forwards = 0
for mode in ("off", "auto", "read"):
    target = TargetModel(LlamaForCausalLM.from_pretrained(folder / "target"))
    hidden = target.hidden

    def counted(*args, **kwargs):
        global forwards
        forwards += 1
        return hidden(*args, **kwargs)

    target.hidden = counted
    forwards = 0
    arguments = OptimisationArguments(
        output_dir=str(folder / mode),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        training_args={"use_cpu": True, "disable_tqdm": True, "ddp_backend": "gloo"},
    )
    args = to_training_arguments(arguments, "shared")
    train_heads(
        target,
        load_from_disk(str(folder / "rows")),
        eval_dataset=load_from_disk(str(folder / "held_out")),
        config=HeadsConfig(num_heads=2),
        output_dir=folder / mode,
        training_args=args,
        hidden_cache=CacheArguments(mode, None if mode == "off" else str(folder / "cache")),
    )
    (folder / f"{mode}-{args.process_index}.txt").write_text(str(forwards))
"""


@pytest.mark.slow
def test_two_processes_fill_one_cache(
    target: TargetModel, texts: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    target.model.save_pretrained(tmp_path / "target")
    for rows, name in zip(texts, ("rows", "held_out"), strict=True):
        rows.save_to_disk(str(tmp_path / name))
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--master_port=0", "--standalone", str(script), str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights = [
        load_file(tmp_path / mode / "medusa_lm_head.safetensors")
        for mode in ("off", "auto", "read")
    ]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights[2][name], tensor, rtol=1e-4, atol=1e-5)
    ran = {
        mode: [int((tmp_path / f"{mode}-{rank}.txt").read_text()) for rank in range(2)]
        for mode in ("auto", "read")
    }
    assert ran["read"] == [0, 0]
    # 17 rows and 5 held-out ones, each rank its half once; and one token for the dtype.
    assert all(count <= 5 + 2 + 1 for count in ran["auto"]), ran
    assert done.stdout.count("Hidden states:") == 2  # said once a run, not once a process
