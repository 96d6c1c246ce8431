"""From corpora to rows, and the corpora and rows that are refused."""

import json
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from medusa_heads.target.loading import find_tokenizer
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data import prepare, split
from medusa_heads.training.data.columns import collate
from medusa_heads.training.data.prepare import (
    TrainingData,
    load_corpora,
    prepare_data,
)
from medusa_heads.training.data.split import hold_out


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, w0 .. w59."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def test_the_batch_is_padded_on_the_right() -> None:
    batch = collate(
        [
            {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
            {"input_ids": [8], "labels": [8]},
        ]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]


def test_packed_rows_have_positions_and_no_mask() -> None:
    batch = collate(
        [
            {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "position_ids": [0, 1, 0]},
            {"input_ids": [8], "labels": [8], "position_ids": [0]},
        ]
    )
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]


def test_padding_does_not_change_hidden_states(target: TargetModel) -> None:
    short = {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    batch = collate([short, {"input_ids": [1] * 9, "labels": [1] * 9}])
    alone = collate([short])
    together_BTD = target.hidden(batch["input_ids"], batch["attention_mask"])
    alone_BTD = target.hidden(alone["input_ids"], alone["attention_mask"])
    torch.testing.assert_close(together_BTD[:1, :3], alone_BTD)


def test_whole_documents_are_held_out_and_the_draw_is_seeded() -> None:
    rows = Dataset.from_list(
        [{"input_ids": [i], "labels": [i], "document": i // 3} for i in range(60)]
    )
    kept, held = hold_out(rows, 0.2, seed=1)
    assert len(set(held["document"])) == 4 and len(held) == 12
    assert not set(kept["document"]) & set(held["document"])
    assert hold_out(rows, 0.2, seed=1)[1]["input_ids"][:] == held["input_ids"][:]
    assert hold_out(rows, 0.2, seed=2)[1]["input_ids"][:] != held["input_ids"][:]


def test_a_single_document_is_held_out_in_part() -> None:
    rows = Dataset.from_list([{"input_ids": [i], "document": 0} for i in range(10)])
    assert [len(part) for part in hold_out(rows, 0.05, seed=0)] == [9, 1]
    with pytest.raises(ValueError, match="single row"):
        hold_out(rows.select([0]), 0.05, seed=0)


def test_a_count_of_documents_is_held_out() -> None:
    rows = Dataset.from_list([{"input_ids": [i], "document": i // 2} for i in range(10)])
    assert [len(part) for part in hold_out(rows, 0.05, seed=0, count=3)] == [4, 6]
    with pytest.raises(ValueError, match="eval_rows 5 would hold out all 5 documents"):
        hold_out(rows, 0.05, seed=0, count=5)


def test_an_evaluation_does_not_grow_with_the_text_unless_asked_to(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (prepare, split):
        monkeypatch.setattr(module, "EVAL_ROWS", 4)
    rows = Dataset.from_list(
        [
            {"input_ids": [i % 60, i // 60, 2, 3], "labels": [i % 60, i // 60, 2, 3]}
            for i in range(200)
        ]
    )

    def measured(eval_dataset: Dataset | None = None, **settings: Any) -> Dataset:
        given = DataArguments(**settings)
        corpora = load_corpora(given, rows, eval_dataset)
        caplog.clear()
        data = prepare_data(target, *corpora, None, given, num_heads=2, seed=0)
        assert eval_dataset is not None or len(data.rows) + len(data.held_out) == len(rows)
        return data.held_out

    assert len(measured()) == 4 and not caplog.messages  # 5 % are ten, of which six are learnt
    assert len(measured(eval_share=0.05)) == 10 and len(measured(eval_rows=9)) == 9
    drawn = measured(rows.select(range(50)))
    assert caplog.messages == ["4 of 50 held-out rows are measured: eval_rows says of how many"]
    assert drawn["input_ids"][:] == measured(rows.select(range(50)))["input_ids"][:]
    assert max(row["input_ids"][0] for row in drawn) > 8
    assert len(measured(rows.select(range(50)), eval_rows=30)) == 30
    assert len(measured(rows.select(range(50)), eval_rows=50)) == 50 and not caplog.messages


def words(count: int, first: int = 1) -> str:
    return " ".join(f"w{(first + i) % 60}" for i in range(count))


def prepared(
    target: TargetModel, tokenizer: Any, rows: list[dict[str, Any]], **settings: Any
) -> TrainingData:
    given = DataArguments(**{"max_length": 16, **settings})
    corpus, held_out = load_corpora(given, Dataset.from_list(rows))
    return prepare_data(target, corpus, held_out, tokenizer, given, num_heads=2, seed=0)


def test_what_was_read_is_recorded(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": words(3), "completion": " " + words(9, i)} for i in range(6)]
    rows += [
        {"prompt": words(4), "completion": " " + words(20)},
        {"prompt": "w1", "completion": ""},
    ]
    rows += [{"prompt": words(16), "completion": " w1"}]
    data = prepared(target, tokenizer, rows, on_bad_row="skip", eval_rows=2)
    record = data.record()
    [corpus] = record["corpora"]
    assert (record["training_set"]["rows"], record["held_out_set"]["rows"]) == (5, 2)
    assert (corpus["name"], corpus["format"]) == ("dataset", "prompt + completion")
    assert (corpus["bad_rows"], corpus["cut_documents"], corpus["cut_tokens"]) == (2, 1, 8)
    assert corpus["bad_row_examples"] == [
        "dataset row 8: 'completion' is empty",
        "dataset row 9: of its 17 tokens no answer is left within max_length 16",
    ]
    assert "1 documents of dataset were longer than max_length 16: 8 supervised" in caplog.text
    with pytest.raises(
        ValueError, match=r"2 broken rows \(dataset row 8: .*; dataset row 9: of its"
    ):
        prepared(target, tokenizer, rows)


def test_rows_left_out_on_reading_are_told_of_once(
    target: TargetModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' + 4 * '{"text": "w1 w2 w3 w4"}\n')
    settings = DataArguments(dataset=[str(tmp_path / "a.jsonl")], on_bad_row="skip", max_length=16)
    corpus, held_out = load_corpora(settings)
    prepare_data(target, corpus, held_out, tokenizer, settings, num_heads=2, seed=0)
    assert caplog.text.count("left out 1 broken row") == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_the_target_refuses_are_left_out_too(
    target: TargetModel, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input_ids": [i] * 5, "labels": [i] * 5} for i in range(9)]
    rows[4] = {"input_ids": [61] * 5, "labels": [61] * 5}
    rows[6] = {"input_ids": [1, 2, 3], "labels": [2, 3, -100]}
    rows[7] = {"input_ids": [7] * 70, "labels": [7] * 70}
    settings = DataArguments(max_length=80, on_bad_row="skip", streaming=streaming, eval_rows=2)
    corpus, held_out = load_corpora(settings, Dataset.from_list(rows))
    data = prepare_data(target, corpus, held_out, None, settings, num_heads=2, seed=0, max_steps=3)
    assert data.facts.rows + data.held_out_facts.rows == 6
    [record] = data.record()["corpora"]
    assert record["bad_rows"] == 3
    assert [example[:13] for example in record["bad_row_examples"]] == [
        f"dataset row {row}" for row in (5, 7, 8)
    ]
    assert "dataset row 5: has token ids from 61 to 61, the target's vocabulary" in caplog.text
    assert "dataset row 8: has 70 tokens, more than the target's context of 64" in caplog.text


@pytest.mark.parametrize("of_eval", [False, True])
def test_all_rows_that_the_target_refuses_are_named_by_place(
    target: TargetModel, of_eval: bool, tmp_path: Any
) -> None:
    """Also of tables of tokens, which are taken as they are, and whichever are held out."""
    rows = [{"input_ids": [i] * 5, "labels": [i] * 5} for i in range(40)]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("\n".join(map(json.dumps, rows)))
    for row in (3, 20, 39):
        rows[row] = {"input_ids": [61 + row] * 5, "labels": [61 + row] * 5}
    bad.write_text("\n".join(map(json.dumps, rows)))
    names = [str(good if of_eval else bad)]
    settings = DataArguments(dataset=names, eval_dataset=[str(bad)] if of_eval else None)
    corpora = load_corpora(settings)
    told = r"; ".join(f"{bad}:{row}: has token ids from {60 + row} .*" for row in (4, 21, 40))
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"has 3 broken rows \({told}\): mend them"):
            prepare_data(target, *corpora, None, settings, num_heads=2, seed=0)
        corpora = load_corpora(settings)


def test_processes_share_the_tokenising(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"text": words(40, i)} for i in range(6)]
    alone = prepared(target, tokenizer, rows)
    shared = prepared(target, tokenizer, rows, dataset_num_proc=2)
    assert alone.facts == shared.facts and alone.held_out_facts == shared.held_out_facts


def test_packing_fills_rows_and_leaves_the_held_out_ones(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"text": words(3 + i % 5, i)} for i in range(30)]
    loose = prepared(target, tokenizer, rows)
    data = prepared(target, tokenizer, rows, packing=True)
    assert data.facts == loose.facts
    assert data.record()["training_set"]["packed_rows"] == len(data.rows) < len(loose.rows) / 2
    assert "position_ids" not in data.held_out.column_names
    lengths = [len(row["input_ids"]) for row in data.rows]
    assert max(lengths) <= 16 and sum(lengths) == data.facts.tokens


def test_a_corpus_without_text(target: TargetModel, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="the corpus is empty: give one with text"):
        prepared(target, tokenizer, [{"text": ""}], on_bad_row="skip")
    with pytest.raises(ValueError, match="do not fit the target's context of 64: lower max_length"):
        prepared(target, tokenizer, [{"text": "w1"}], max_length=65)


def test_text_without_a_tokenizer(target: TargetModel) -> None:
    assert find_tokenizer("") is None
    with pytest.raises(ValueError, match="text needs the target's tokenizer"):
        prepared(target, None, [{"text": "a"}])


def test_conversations_without_a_template(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    with pytest.raises(ValueError, match="the tokenizer has no chat template, which conversations"):
        prepared(target, tokenizer, [{"messages": turns}])
    halves = {"prompt": turns[:1], "completion": turns[1:]}
    with pytest.raises(ValueError, match="messages need a chat template, and the tokenizer has no"):
        prepared(target, tokenizer, [halves])


def test_the_embedded_corpus_brings_its_held_out_part() -> None:
    assert load_corpora(DataArguments(dataset=["stdlib"]))[1] is not None
    with pytest.raises(ValueError, match="dataset must name at least one corpus, got none"):
        load_corpora(DataArguments())


def test_the_held_out_set_can_be_a_split(tmp_path: Any) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    corpus, held_out = load_corpora(DataArguments(dataset=[str(tmp_path)], eval_split="test"))
    assert held_out is not None
    assert [corpus.rows["text"][0], held_out.rows["text"][0]] == ["train", "test"]
    assert load_corpora(DataArguments(dataset=[str(tmp_path)]))[1] is None
    with pytest.raises(ValueError, match="has no split 'dev'"):
        load_corpora(DataArguments(dataset=[str(tmp_path)], eval_split="dev"))
    of_a_file = DataArguments(dataset=[str(tmp_path / "train.jsonl")], eval_split="train")
    with pytest.raises(ValueError, match="files have no split 'train'"):
        load_corpora(of_a_file)


def test_measuring_on_the_text_that_is_learnt_is_warned_of(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Any
) -> None:
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {words(9, i)}"}) for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def said(eval_dataset: str) -> list[str]:
        learnt, measured = [f"{tmp_path}/a.jsonl"], [f"{tmp_path}/{eval_dataset}"]
        settings = DataArguments(dataset=learnt, eval_dataset=measured, max_length=16)
        corpora = load_corpora(settings)
        data = prepare_data(target, *corpora, tokenizer, settings, num_heads=2, seed=0)
        return [each for each in data.warnings if "is the training set" in each]

    assert len(said("a.jsonl")) == 1 and not said("b.jsonl")
