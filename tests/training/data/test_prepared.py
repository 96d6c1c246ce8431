"""Prepared rows are made once, whole, and found again."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk

from medusa_heads.target.target import TargetModel
from medusa_heads.training.data import tokenise
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.data.prepared import INDEX_FILE, prepared, prepared_folder
from medusa_heads.training.data.tokeniser import Tokeniser
from tests.killed import dies
from tests.pairs import alternately, with_slow
from tests.training import templates
from tests.training.packing import prepare, table


def texts(count: int = 30) -> list[dict[str, str]]:
    return [{"text": "x " * (number % 7 + 2)} for number in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many batches were tokenised since it was last asked."""
    calls: list[int] = []
    tokenising = Tokeniser.__call__

    def call(self: Any, batch: Any, documents: Any) -> Any:
        calls.append(len(documents))
        return tokenising(self, batch, documents)

    monkeypatch.setattr(Tokeniser, "__call__", call)

    def since() -> int:
        count = sum(calls)
        calls.clear()
        return count

    return since


def test_the_second_start_tokenises_nothing_and_reads_from_disk(
    wide: TargetModel, tokenizer: Any, tmp_path: Path, counted: Callable[[], int]
) -> None:
    first: TrainingData = prepare(wide, tokenizer, texts(), tmp_path, packing=True)
    assert counted() == 30
    first.known_rows.map(lambda row: {"labels": row["input_ids"]})  # kept beside them by datasets
    again = prepare(wide, tokenizer, texts(), tmp_path, packing=True)
    assert counted() == 0 and table(again.rows) == table(first.rows)
    assert again.record() == first.record()
    for rows in (again.rows, again.known_rows, again.held_out):
        files = [Path(file["filename"]) for file in rows.cache_files]
        assert files and all(tmp_path in file.parents for file in files)


def test_what_rows_hang_on_is_prepared_anew(
    wide: TargetModel, tokenizer: Any, tmp_path: Path, counted: Callable[[], int]
) -> None:
    def count(tokenizer: Any = tokenizer, rows: Any = None, **given: Any) -> int:
        data = prepare(wide, tokenizer, rows or texts(), tmp_path, **given)
        assert len(data.rows) + len(data.held_out) > 0
        return counted()

    assert count() == 30
    assert count(max_length=16) == 30 and count(rows=[*texts(), {"text": "x"}]) == 31
    (tmp_path / "chat.jinja").write_text(templates.CHATML)
    assert count(chat_template=str(tmp_path / "chat.jinja")) == 30
    other = templates.chat_tokenizer()
    other.eos_token = "<|im_end|>"
    assert count(other) == 30
    # The same tokens, in another split.
    assert count(eval_rows=3) == 0 and count(packing=True) == 0 and count() == 0


@pytest.mark.parametrize("saved", with_slow([True], [False]))
def test_a_table_that_changed_under_its_fingerprint_is_prepared_anew(
    saved: bool, wide: TargetModel, tokenizer: Any, tmp_path: Path
) -> None:
    """So does what a function of a user's module made, after an edit of the module."""
    first, named = [], set()
    for word in ("x", "yes", "yes"):
        rows = Dataset.from_list(texts()).map(
            lambda row, word=word: {"text": row["text"].replace("x", word)}, new_fingerprint="same"
        )
        if saved:
            rows.save_to_disk(str(tmp_path / "saved"))
            rows = load_from_disk(str(tmp_path / "saved"))
        named.add(rows._fingerprint)
        data = prepare(wide, tokenizer, rows, tmp_path)
        first.append(tokenizer.decode(data.known_rows[0]["input_ids"]).split()[0])
    assert first == ["x", "yes", "yes"] and len(named) == 1


def test_an_interrupted_preparation_goes_on(
    wide: TargetModel,
    tokenizer: Any,
    tmp_path: Path,
    counted: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenise, "_ROWS_OF_A_PART", 8)
    whole = prepare(wide, tokenizer, texts(), tmp_path / "whole")
    counted()
    write = tokenise.write_whole
    done: list[Path] = []

    def interrupted(path: Path, make: Callable[[Path], object]) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        write(path, make)
        done.append(path)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tokenise, "write_whole", interrupted)
        prepare(wide, tokenizer, texts(), tmp_path / "parts")
    assert counted() == 16
    again = prepare(wide, tokenizer, texts(), tmp_path / "parts")
    assert counted() == 14 and table(again.rows) == table(whole.rows)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert not list(tmp_path.rglob("*.part"))


@pytest.fixture(scope="module")
def whole(
    wide: TargetModel, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Any]:
    """Rows that were prepared once: their folder, the rows, and what is recorded of them."""
    folder = tmp_path_factory.mktemp("whole")
    data = prepare(wide, tokenizer, texts(), folder, packing=True)
    return folder, table(data.rows), data.record()


@pytest.mark.parametrize(
    ("name", "damage"),
    alternately(
        ("part.arrow", "known.arrow", "facts.json", "bins.arrow", INDEX_FILE),
        ("cut", "flipped", "gone"),
        slow=("known.arrow", "bins.arrow"),
    ),
)
def test_damaged_files_are_noticed_and_made_anew(
    name: str,
    damage: str,
    whole: tuple[Path, Any, Any],
    wide: TargetModel,
    tokenizer: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, rows, record = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.rglob(name):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.unlink()
        if damage != "gone":
            file.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    again = prepare(wide, tokenizer, texts(), tmp_path, packing=True)
    assert table(again.rows) == rows and again.record() == record
    warned = [line for line in caplog.messages if "is damaged: what lies beside it" in line]
    assert len(warned) == (
        0 if (name, damage) == (INDEX_FILE, "gone") else 1 + (name == INDEX_FILE)
    )
    caplog.clear()
    prepare(wide, tokenizer, texts(), tmp_path, packing=True)
    assert not caplog.messages


def test_what_is_refused_leaves_nothing(wide: TargetModel, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 broken row"):
        prepare(wide, tokenizer, [*texts(), {"text": ""}], tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_place_that_cannot_be_written_is_chosen_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the cache of a home is in many containers, which nobody asked for."""
    (tmp_path / "home").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "home")
    for place, by in ((None, "HF_DATASETS_CACHE"), (str(tmp_path / "home"), "prepared_dir")):
        with pytest.raises(ValueError, match=f"found a file at .*: choose another, by {by}$"):
            prepared_folder(place)


def test_a_drive_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    told = f"no file can be locked in '{tmp_path}' .No locks available.* let prepared_dir name"
    with pytest.raises(ValueError, match=told), prepared(tmp_path / "0123456789abcdef"):
        pass


def test_one_process_makes_and_the_others_wait(tmp_path: Path) -> None:
    """Each holds the lock by a file of its own, as processes do."""
    told: list[bool] = []

    def ask() -> None:
        with prepared(tmp_path / "rows") as found:
            told.append(found)

    other = threading.Thread(target=ask)
    with prepared(tmp_path / "rows") as found:
        other.start()
        other.join(0.2)
        assert not found and not told
        (tmp_path / "rows" / "file").write_text("made")
    other.join()
    assert told == [True]
    assert list(json.loads((tmp_path / "rows" / INDEX_FILE).read_text())["files"]) == ["file"]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The default place."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "medusa_heads").mkdir()
    return tmp_path / "medusa_heads"


def used(folder: Path, days: float) -> None:
    """Let a folder's last use lie so many days back."""
    then = time.time() - days * 24 * 60 * 60
    os.utime(folder, (then, then))


def test_rows_that_no_run_has_used_for_long_are_removed(
    wide: TargetModel, tokenizer: Any, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of other text, of an interrupted run too; not those that are still asked for, nor what
    somebody else has put there."""
    made, young, half, of_others = (home / (digit * 16) for digit in "abcd")
    for folder in (made, young):
        make(folder)
    for folder in (half, of_others):
        folder.mkdir()
        (folder / "part").write_text("half")
    half.with_suffix(".lock").touch()
    for folder, days in ((made, 31), (young, 29), (half, 31), (of_others, 31)):
        used(folder, days)
    prepare(wide, tokenizer, texts(), home)
    assert not made.exists() and not half.exists()
    assert (young / "file").exists() and (of_others / "part").exists()
    (said,) = caplog.messages
    assert said.startswith("2 folders of rows that no run had used for 30 days were removed from")
    for folder in home.iterdir():
        if folder.is_dir():
            used(folder, 31)
    first = prepare(wide, tokenizer, texts(), home)  # whose use is noted before all else
    assert not young.exists() and first.rows.cache_files


def make(folder: Path) -> None:
    """In a process that ends, as runs do, and with it what it holds."""

    def work() -> None:
        with prepared(folder):
            (folder / "file").write_text("made")

    assert not dies(work)


def test_rows_that_a_living_process_uses_stay(home: Path) -> None:
    """However long ago it asked for them: its workers may open the files again."""
    mine = home / ("a" * 16)
    with prepared(mine):
        (mine / "file").write_text("made")
    used(mine, 1000)
    make(home / ("b" * 16))
    assert (mine / "file").exists()


def test_rows_in_a_place_of_the_users_own_stay(home: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / ("a" * 16)
    make(mine)
    used(mine, 1000)
    make(tmp_path / "mine" / ("b" * 16))
    assert (mine / "file").exists()
