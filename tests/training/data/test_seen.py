"""Rows with images: what training reads of them is what the model makes of its processor's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data.pack import hidden_of
from medusa_heads.training.data.prepare import TrainingData, load_corpora, prepare_data
from tests.training import seeing


def prepared(kind: str, file: str, **settings: Any) -> TrainingData:
    told = DataArguments([file], eval_dataset=[file], **{"max_length": 400, **settings})
    given = seeing.target(kind), *load_corpora(told), seeing.processor(kind), told
    return prepare_data(*given, num_heads=2, seed=0)


def own_inputs(kind: str, messages: Any, folder: Path) -> Any:
    """What the processor makes of messages, whose images are named as it wants it."""
    talk = json.loads(json.dumps(messages).replace('"path": "', f'"path": "{folder}/'))
    given = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return seeing.processor(kind).apply_chat_template([talk], **given)


def states(kind: str, inputs: Any) -> Tensor:
    """What the lm_head reads in the model's own forward."""
    target, seen = seeing.target(kind), []
    hook = target.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    with hook, torch.no_grad():
        target.model(**inputs)
    return seen[0][0]


@pytest.mark.parametrize("kind", seeing.KINDS)
def test_states_are_those_of_the_models_own_forward(kind: str, tmp_path: Path) -> None:
    data = prepared(kind, seeing.corpus(tmp_path, seeing.SEVERAL))
    target = seeing.target(kind)
    together_BTD = hidden_of(target, data.sight.collate([*data.rows]))
    assert len(data.rows) == len(seeing.SEVERAL)
    for place, (row, said) in enumerate(zip(data.rows, seeing.SEVERAL, strict=True)):
        inputs = own_inputs(kind, said["messages"], tmp_path)
        count = len(row["input_ids"])
        if row["images"]:  # texts alone are encoded as they always were
            assert row["input_ids"] == inputs["input_ids"][0].tolist()
        else:
            assert row["input_ids"] == inputs["input_ids"][0, 1:].tolist()
            inputs = {"input_ids": inputs["input_ids"][:, 1:]}
        expected_TD = states(kind, inputs)
        alone_TD = hidden_of(target, data.sight.collate([row]))[0]
        torch.testing.assert_close(alone_TD, expected_TD)
        torch.testing.assert_close(together_BTD[place, :count], expected_TD, atol=1e-4, rtol=1e-4)
