"""A target without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_heads.data.prompts import stop_ids
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.meta_target import meta_target, weights_on_disk
from scripts.prove.seeing.models import build


def test_it_stops_where_the_target_does(target: TargetModel, tmp_path: Path) -> None:
    """Many models name the end of an answer beside their configuration alone."""
    target.model.generation_config.eos_token_id = [1, 7]
    target.model.save_pretrained(tmp_path)
    arguments = TargetArguments(str(tmp_path))
    assert stop_ids(meta_target(arguments).model) == (1, 7)
    (tmp_path / "generation_config.json").unlink()
    assert stop_ids(meta_target(arguments).model) == (target.config.eos_token_id,)


def test_a_target_that_reads_images_is_of_the_class_that_is_loaded(tmp_path: Path) -> None:
    """transformers knows most of them as no causal LMs."""
    loaded = build("qwen3_vl")
    loaded.save_pretrained(tmp_path)
    made = meta_target(TargetArguments(str(tmp_path), dtype="float32"))
    assert type(made.model) is type(loaded)
    assert made.vocab_size == TargetModel(loaded).vocab_size


def test_weights_are_here_where_all_files_of_the_index_are(tmp_path: Path) -> None:
    arguments, index = TargetArguments(str(tmp_path)), tmp_path / "model.safetensors.index.json"
    assert not weights_on_disk(arguments)
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (tmp_path / "1.safetensors").touch()
    assert not weights_on_disk(arguments)
    (tmp_path / "2.safetensors").touch()
    assert weights_on_disk(arguments)


@pytest.mark.parametrize("content", [{}, [], {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_of_weights_that_is_damaged_is_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"index\.json"):
        weights_on_disk(TargetArguments(str(tmp_path)))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"hidden_act": "none"}),
        ("config.json", {"layer_types": 5}),
        ("generation_config.json", {"eos_token_id": "x"}),
    ],
)
def test_damaged_files_are_named_as_where_the_target_is_loaded(
    target: TargetModel, tmp_path: Path, file: str, damage: dict[str, Any]
) -> None:
    target.model.save_pretrained(tmp_path)
    path = tmp_path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ValueError, match=r"expected (the config|the id)") as refusal:
        meta_target(TargetArguments(str(tmp_path)))
    assert str(tmp_path) in str(refusal.value)
