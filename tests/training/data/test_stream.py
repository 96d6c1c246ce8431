"""Corpora that are read while training: the same rows as a table's, again and again."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerFast

from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.runs.heads import train_heads
from tests.pairs import with_slow
from tests.training.data.streaming import first, sharded, stream

DOCUMENTS = 24


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, w0 .. w59."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files of documents, each of words of its own, the shortest of 4 tokens."""
    for part in range(2):
        lines = []
        for d in range(part * 12, part * 12 + 12):
            words = " ".join(f"w{(2 * d + i % 2) % 60}" for i in range(4 + d % 9))
            lines.append(json.dumps({"text": words}) + "\n")
        (tmp_path / f"part{part}.jsonl").write_text("".join(lines))
    return tmp_path


def test_a_stream_holds_out_its_first_documents_and_never_ends(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast, corpus: Path
) -> None:
    data = stream(target, tokenizer, corpus)
    rows = first(data, 45)
    assert [ids[0] for ids in data.held_out["input_ids"]] == [0, 2, 4, 6]
    assert [ids[0] for ids in rows[:20]] == [2 * d for d in range(4, DOCUMENTS)]
    assert rows[:20] == rows[20:40] and rows[40:] == rows[:5]
    assert data.known_rows["input_ids"][:] == rows[:20] and data.facts.rows == 20
    record = data.record()
    assert record["training_set"]["first_rows_of_the_stream"]["rows"] == 20
    assert "cut_documents" not in record["corpora"][0]


@pytest.mark.parametrize("packing", with_slow([False], [True]))
def test_no_share_of_a_stream_has_held_out_documents(target: TargetModel, packing: bool) -> None:
    """accelerate gives each process some of the shards, and so do loaders their workers."""
    data = stream(target, None, sharded([0, 1, 2, 3]), eval_rows=8, packing=packing)
    held = {ids[0] for ids in data.held_out["input_ids"]}
    assert held == set(range(8))
    seen: list[set[int]] = []
    for shares in (1, 2, 4):
        seen.append(set())
        for index in range(shares):
            share = data.rows.shard(num_shards=shares, index=index)
            seen[-1] |= {i for row in itertools.islice(share, 60) for i in row["input_ids"]}
    assert seen == [set(range(8, 48))] * 3


def test_a_share_of_nothing_but_held_out_documents_is_refused(target: TargetModel) -> None:
    with pytest.raises(ValueError, match="the first of the stream's 4 files is held out whole"):
        stream(target, None, sharded([0, 1, 2, 3]), eval_rows=12)


def test_tables_need_nothing_of_datasets_streams(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose passes are a class that datasets does not promise."""
    monkeypatch.delattr("datasets.iterable_dataset.RepeatExamplesIterable")
    monkeypatch.delitem(sys.modules, "medusa_heads.training.data.stream", raising=False)
    table = Dataset.from_list(list(sharded([0])))
    assert first(stream(target, None, table, streaming=False), 1)
    with pytest.raises(ValueError, match=r"datasets .* has no streams .*: leave streaming off"):
        stream(target, None, sharded([0]))


def test_a_stream_is_shuffled_by_its_seed(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast, corpus: Path
) -> None:
    plain = first(stream(target, tokenizer, corpus), 20)
    data = stream(target, tokenizer, corpus, shuffle_buffer=30)
    mixed = first(data, 20)
    assert mixed != plain and sorted(mixed) == sorted(plain)
    assert first(data, 20) == mixed
    assert first(stream(target, tokenizer, corpus, shuffle_buffer=30), 20) == mixed


def test_a_stream_is_packed(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast, corpus: Path
) -> None:
    data = stream(target, tokenizer, corpus, packing=True)
    plain = first(stream(target, tokenizer, corpus), 20)
    packed = list(itertools.islice(data.rows, 12))
    documents = []
    for row in packed:
        assert set(row) == {"input_ids", "labels", "position_ids"} and len(row["input_ids"]) <= 16
        starts = [t for t, position in enumerate(row["position_ids"]) if position == 0]
        ends = [*starts[1:], len(row["input_ids"])]
        documents += [row["input_ids"][a:b] for a, b in zip(starts, ends, strict=True)]
    assert sorted(documents[:20]) == sorted(plain)


def test_datasets_streams_and_tables_can_be_streamed(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    table = Dataset.from_list([{"text": f"w{i} " * 6} for i in range(8)])
    for given in (table, table.to_iterable_dataset()):
        data = stream(target, tokenizer, given)
        assert first(data, 4) == [[i] * 6 for i in range(4, 8)]


def test_broken_rows_of_a_stream_are_counted_once_by_their_own_place(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast, corpus: Path
) -> None:
    with (corpus / "part1.jsonl").open("a") as file:
        file.write('{"text": ""}\n{"text": "w1 w2 w3"}\n')
    data = stream(target, tokenizer, corpus, on_bad_row="skip")
    assert first(data, 21)[20] == [1, 2, 3]
    assert len(first(data, 60)) == 60
    [record] = data.record()["corpora"]
    assert (
        record["bad_rows"] == 1
        and "part1.jsonl:13: 'text' is empty" in (record["bad_row_examples"][0])
    )
    with pytest.raises(ValueError, match=r"part1.jsonl:13: 'text' is empty"):
        stream(target, tokenizer, corpus)


def test_rows_that_only_the_target_or_the_tokenizer_refuses(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": f"w{i}", "completion": " w2 w3 w4"} for i in range(8)]
    rows[6] = {"prompt": "w1 " * 20, "completion": "w1"}
    data = stream(target, tokenizer, Dataset.from_list(rows), on_bad_row="skip")
    assert data.record()["corpora"][0]["bad_row_examples"] == [
        "dataset row 7: of its 21 tokens no answer is left within max_length 16"
    ]
    ready = Dataset.from_list([{"input_ids": [99] * 5, "labels": [99] * 5}] * 8)
    with pytest.raises(ValueError, match="row 1: has token ids from 99 to 99, the target's vocab"):
        stream(target, None, ready)


@pytest.mark.parametrize("parts", with_slow([3], [1]))
def test_the_vocabulary_of_a_stream_comes_from_all_over_it(
    target: TargetModel, tmp_path: Path, parts: int
) -> None:
    """300 rows of few tokens come before as many of others."""

    def read(files: list[int]) -> Any:
        for file in files:
            for i in range(600 // parts):
                late = file * (600 // parts) + i >= 300
                ids = [40 * late + i % 4] * 6
                yield {"input_ids": ids, "labels": ids}

    kinds = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})
    rows = IterableDataset.from_generator(
        read, features=kinds, gen_kwargs={"files": list(range(parts))}
    )
    args = OptimisationArguments(
        output_dir=str(tmp_path), max_steps=1, training_args={"use_cpu": True, "disable_tqdm": True}
    )
    heads = train_heads(
        target,
        rows,
        eval_dataset=Dataset.from_list([{"input_ids": [1] * 9, "labels": [1] * 9}]),
        config=HeadsConfig(num_heads=1, draft_vocab_size=8),
        output_dir=tmp_path,
        training_args=to_training_arguments(args, "shared"),
    )
    assert heads.draft_tokens is not None
    assert heads.draft_tokens.tolist() == [0, 1, 2, 3, 40, 41, 42, 43]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_rows": DOCUMENTS}, "no text beyond its first 24 documents, which are held out"),
        ({"dataset_num_proc": 2}, "leave dataset_num_proc out"),
    ],
)
def test_streams_that_cannot_be_trained_on(
    settings: Any,
    message: str,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Path,
) -> None:
    with pytest.raises(ValueError, match=message):
        stream(target, tokenizer, corpus, **settings)


def run(target: TargetModel, tokenizer: Any, folder: Path, corpus: Path, **more: Any) -> Any:
    args = OptimisationArguments(
        output_dir=str(folder),
        max_steps=12,
        per_device_train_batch_size=3,
        save_steps=8,
        eval_steps=8,
        learning_rate=1e-2,
        save_total_limit=2,
        training_args={"use_cpu": True, "disable_tqdm": True},
    )
    settings = {"max_length": 16, "streaming": True, "eval_rows": 4, "packing": True, **more}
    return train_heads(
        target,
        f"{corpus}/*.jsonl",
        output_dir=folder,
        training_args=to_training_arguments(args, "shared"),
        tokenizer=tokenizer,
        **settings,
    )


def test_a_resumed_run_on_a_stream_ends_bitwise_like_the_whole_one(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast, corpus: Path, tmp_path: Path
) -> None:
    """Step 8 of 12 lies beyond the corpus's end: the stream has begun anew."""
    whole = run(target, tokenizer, tmp_path / "whole", corpus).state_dict()
    (tmp_path / "again").mkdir()
    (tmp_path / "whole" / "checkpoint-8").rename(tmp_path / "again" / "checkpoint-8")
    torch.manual_seed(5)
    again = run(
        target, tokenizer, tmp_path / "again", corpus, resume_from_checkpoint="last"
    ).state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    story = yaml.safe_load((tmp_path / "again" / "run.yaml").read_text())
    assert story["corpora"][0]["format"] == "text" and story["held_out_set"]["rows"] == 4


def test_a_stream_is_nothing_to_measure_on(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    stream: Any = make_rows(4).to_iterable_dataset()
    with pytest.raises(ValueError, match="the held-out set is a stream"):
        train_heads(target, make_rows(8), eval_dataset=stream, output_dir=tmp_path)


def test_a_stream_needs_a_number_of_steps(
    target: TargetModel, tokenizer: PreTrainedTokenizerFast, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="a stream has no known end: give max_steps"):
        train_heads(
            target,
            f"{corpus}/*.jsonl",
            output_dir=tmp_path,
            tokenizer=tokenizer,
            max_length=16,
            streaming=True,
        )
