"""Answers on disk: of one backend and one set of settings, and whole."""

import json
import os
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk

from medusa_heads.contents import SIDECAR_FILE
from medusa_heads.files import lock_folder
from medusa_heads.inference.regeneration import places
from medusa_heads.inference.regeneration import store as store_module
from medusa_heads.inference.regeneration.answers import EMPTY, SERVER_ERROR, Accounting, Answer
from medusa_heads.inference.regeneration.dialogues import Row
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.store import (
    RECORD_FILE,
    AnswerStore,
    check_output,
    own_words,
    write_output,
    write_rows,
)


def opened(folder: Path, who: str = "me") -> closing[AnswerStore]:
    return closing(AnswerStore(folder, {"who": who}))


def test_answers_are_of_one_backend_and_one_set_of_settings(tmp_path: Path) -> None:
    prompt = Prompt([1, 2], greedy=True)
    with opened(tmp_path) as store:
        store.add([(prompt, Answer([5, 6], remarks=("odd",)))])
        assert not store.is_old(prompt)
        with opened(tmp_path) as beside:  # what is added is there at once
            again = beside.get(prompt)
            assert again is not None and (list(again.tokens), again.remarks) == ([5, 6], ("odd",))
            assert beside.is_old(prompt)
    with opened(tmp_path, "you") as other:
        assert other.get(prompt) is None


def test_names_with_the_shape_of_a_secret_are_told_apart_and_not_written(tmp_path: Path) -> None:
    """Such as those of runs that are numbered in hexadecimal."""
    prompt, names = Prompt([1, 2], greedy=True), ["run-" + "a1" * 20, "run-" + "b2" * 20]
    with opened(tmp_path, names[0]) as store:
        store.add([(prompt, Answer([5]))])
    with opened(tmp_path, names[1]) as other:
        assert other.get(prompt) is None
    assert not any(name in file.read_text() for name in names for file in tmp_path.rglob("*.json"))


def test_failures_that_pass_are_known_to_this_run_alone(tmp_path: Path) -> None:
    prompts = [Prompt([1], greedy=True), Prompt([2], greedy=True)]
    with opened(tmp_path) as store:
        store.add([(prompts[0], Answer(failure=SERVER_ERROR)), (prompts[1], Answer(failure=EMPTY))])
        assert all(store.get(prompt) for prompt in prompts)
    with opened(tmp_path) as store:
        assert [store.get(prompt) for prompt in prompts] == [None, Answer(array("q"), EMPTY)]


def test_a_half_written_line_is_no_answer(tmp_path: Path) -> None:
    """Wherever it is cut, and those before it stay."""
    prompts = [Prompt([1], greedy=True, row=row) for row in range(2)]
    with opened(tmp_path) as store:
        store.add([(prompts[0], Answer([7, 8, 300])), (prompts[1], Answer([9]))])
    (file,) = store.folder.glob("answers-*.jsonl")
    whole = file.read_bytes()
    for end in range(whole.index(b"\n") + 1, len(whole)):
        file.write_bytes(whole[:end])
        with opened(tmp_path) as store:
            first = store.get(prompts[0])
            assert first is not None and list(first.tokens) == [7, 8, 300]
            assert store.get(prompts[1]) is None
    with opened(tmp_path) as store:
        store.add([(prompts[1], Answer([9]))])
    with opened(tmp_path) as store:
        again = store.get(prompts[1])
        assert again is not None and list(again.tokens) == [9]


def test_a_damaged_line_is_no_answer(tmp_path: Path) -> None:
    """Whichever byte of it is another."""
    prompts = [Prompt([1], greedy=True, row=row) for row in range(2)]
    with opened(tmp_path) as store:
        store.add([(prompts[0], Answer([7, 8, 300])), (prompts[1], Answer([9]))])
    (file,) = store.folder.glob("answers-*.jsonl")
    whole = file.read_bytes()
    for at in range(whole.index(b"\n") + 1):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with opened(tmp_path) as store:
            assert store.get(prompts[0]) is None
            assert store.get(prompts[1]) is not None or whole[at] == ord("\n")


def test_a_passing_failure_stands_where_a_damaged_line_was(tmp_path: Path) -> None:
    prompt, failure = Prompt([1], greedy=True), Answer(failure=SERVER_ERROR)
    with opened(tmp_path) as store:
        store.add([(prompt, Answer([7, 8]))])
    (file,) = store.folder.glob("answers-*.jsonl")
    file.write_bytes(file.read_bytes().replace(b"7,8", b"7,9"))
    with opened(tmp_path) as store:
        store.add([(prompt, failure)])
        assert store.get(prompt) == failure


def test_many_answers_are_found_by_16_bytes_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_UNSORTED", 7)
    monkeypatch.setattr(store_module, "_MOST_OPEN", 2)
    prompts = [Prompt([1], greedy=True, row=row) for row in range(100)]
    for turn in range(4):  # a third of them is made anew each time, and the last one counts
        with opened(tmp_path) as store:
            store.add(
                [(p, Answer([turn, p.row])) for p in prompts if not turn or p.row % 3 == turn % 3]
            )
            found = [list(a.tokens) for a in map(store.get, prompts) if a]
            held = store._places
            assert len(held._latest) < 7 and held._keys.nbytes + held._at.nbytes <= 16 * 100
    assert found == [[{0: 3, 1: 1, 2: 2}[row % 3], row] for row in range(100)]
    assert len(list(store.folder.glob("answers-*.jsonl"))) == 4


def test_rows_are_mapped_from_a_file_and_say_whose_they_are(tmp_path: Path) -> None:
    def row(*tokens: int) -> Row:
        return {name: array("q", tokens) for name in ("input_ids", "labels")}

    alone = write_rows(((i, row(i, -100)) for i in range(2500)), tmp_path)
    assert alone.column_names == ["input_ids", "labels"] and len(alone.cache_files) == 1
    assert alone["input_ids"][:] == alone["labels"][:] == [[i, -100] for i in range(2500)]
    several = write_rows(iter([(4, row(1)), (6, row(2)), (6, row(3))]), tmp_path)
    assert several["document"][:] == [4, 6, 6] and alone[2499]["input_ids"][0] == 2499


def test_half_a_character_in_a_complaint_does_not_stop_the_record(tmp_path: Path) -> None:
    counted = Accounting(asked=1)
    counted.missed("failed", SERVER_ERROR, 0, 0, "400: \ud800 \u00e9")
    record = write_output(Dataset.from_dict({"input_ids": [[1]]}), counted, tmp_path, {})
    (problem,) = json.loads(record.read_text(encoding="utf-8"))["accounting"]["problems"]
    assert problem["detail"] == "400: \ud800 \u00e9"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", '{"model_type": "llama"}', "a model .config.json."),
        ("model.safetensors", "", "a model .model.safetensors."),
        (SIDECAR_FILE, "{}", "heads"),
    ],
)
def test_no_dataset_is_mixed_with_a_model(
    name: str, content: str, said: str, tmp_path: Path
) -> None:
    check_output(tmp_path, (0, 1))
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"holds {said}: give another output_dir"):
        check_output(tmp_path, (0, 1))


def test_a_dataset_that_another_run_wrote_meanwhile_stands(tmp_path: Path) -> None:
    """Both shards found an empty folder when they began."""
    shards = [{"settings": {"shard_index": index, "num_shards": 2}} for index in range(2)]
    rows = [Dataset.from_dict({"input_ids": [[index]]}) for index in range(2)]
    for index in range(2):
        check_output(tmp_path, (index, 2))
    for _ in range(2):  # the same shard may come again
        write_output(rows[0], Accounting(), tmp_path, shards[0])
    with pytest.raises(ValueError, match=r"holds shard 0 of 2: give another output_dir"):
        write_output(rows[1], Accounting(), tmp_path, shards[1])
    assert load_from_disk(str(tmp_path))["input_ids"][:] == [[0]]
    assert not list(tmp_path.glob(".*.part"))


def test_two_runs_do_not_replace_a_dataset_at_the_same_time(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    assert lock is not None
    rows = Dataset.from_dict({"input_ids": [[1]]})
    try:
        with pytest.raises(ValueError, match="another run is writing its dataset into"):
            write_output(rows, Accounting(), tmp_path, {})
    finally:
        os.close(lock)
    assert write_output(rows, Accounting(), tmp_path, {}).exists()


@pytest.mark.parametrize("target", [{}, {"target": None}, {"target": {}}, {"target": ["me"]}])
def test_a_damaged_record_is_named(target: dict[str, Any], tmp_path: Path) -> None:
    assert own_words("me", str(tmp_path)) is None
    file = tmp_path / RECORD_FILE
    file.write_text(json.dumps({"talks": False, "target": {"name_or_path": "me"}}))
    assert own_words("me", str(tmp_path)) == own_words("./me/", str(tmp_path)) == "plain"
    assert own_words("you", str(tmp_path)) is None
    file.write_text(json.dumps({"talks": True, "target": {"name_or_path": "me"}}))
    assert own_words("me", str(tmp_path)) == "chat"
    file.write_text(json.dumps({"talks": False} | target))
    with pytest.raises(ValueError, match=r"regeneration\.json names no target: .* damaged"):
        own_words("me", str(tmp_path))
