"""A target without its weights."""

from __future__ import annotations

from pathlib import Path

from medusa_heads.data.prompts import stop_ids
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.meta_target import meta_target


def test_it_stops_where_the_target_does(target: TargetModel, tmp_path: Path) -> None:
    """Many models name the end of an answer beside their configuration alone."""
    target.model.generation_config.eos_token_id = [1, 7]
    target.model.save_pretrained(tmp_path)
    arguments = TargetArguments(str(tmp_path))
    assert stop_ids(meta_target(arguments).model) == (1, 7)
    (tmp_path / "generation_config.json").unlink()
    assert stop_ids(meta_target(arguments).model) == (target.config.eos_token_id,)
