"""Streams of rows to train on, and what is read of them."""

import itertools
from pathlib import Path
from typing import Any

from datasets import Features, IterableDataset, List, Value

from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data.prepare import TrainingData, load_corpora, prepare_data


def stream(target: TargetModel, tokenizer: Any, corpus: Any, **settings: Any) -> TrainingData:
    given = {"max_length": 16, "streaming": True, "eval_rows": 4, "shuffle_buffer": 1, **settings}
    in_memory = {}
    if isinstance(corpus, Path):
        given["dataset"] = [f"{corpus}/*.jsonl"]
    else:
        in_memory["dataset"] = corpus
    arguments = DataArguments(**given)
    train, held_out = load_corpora(arguments, **in_memory)
    return prepare_data(
        target, train, held_out, tokenizer, arguments, num_heads=2, seed=0, max_steps=4
    )


def first(data: TrainingData, count: int) -> list[list[int]]:
    return [row["input_ids"] for row in itertools.islice(data.rows, count)]


def sharded(files: list[int], rows: int = 12) -> IterableDataset:
    """A stream that several readers share: document d of file f is its own number, five times."""

    def read(files: list[int]) -> Any:
        for file in files:
            for i in range(rows):
                ids = [file * rows + i] * 5
                yield {"input_ids": ids, "labels": ids}

    kinds = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})
    return IterableDataset.from_generator(read, features=kinds, gen_kwargs={"files": files})
