"""A target laid over devices; training on one is in `test_many_processes.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.device_map import load_placed
from tests.conftest import TinyLlama


@pytest.mark.parametrize("place", ["gpu", "cuda:99", 99, -1, "meta", None])
def test_a_place_that_is_no_device_here_is_refused_in_a_sentence(
    place: Any, tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    arguments = TargetArguments(str(tmp_path), device_map={"": place})
    args = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(ValueError, match="device") as refused:
        load_placed(arguments, args, lambda _: None)
    assert repr(place).strip("'") in str(refused.value)
