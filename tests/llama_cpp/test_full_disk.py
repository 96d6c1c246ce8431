"""A disk that is full before a drafter's file is whole."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from medusa_heads import HeadsConfig, new_heads
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.interop.export import export_heads
from tests.llama_cpp.target_file import write_target
from tests.vllm.partly_trained import load_target


def test_a_file_that_ends_within_a_tensor_is_named(tmp_path: Path) -> None:
    """numpy writes them, and has no word of the system's for it."""
    gguf, model = write_target(tmp_path / "target.gguf", "BF16"), load_target()
    config = HeadsConfig(kind="block", num_heads=2, features=[1, 4])
    heads = save_heads(tmp_path / "heads", new_heads(model, config), model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"dflash-.*\.gguf cannot be written .*is the disk full"):
            export_heads(heads, tmp_path / "out", "gguf", target_gguf=str(gguf))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path.name for path in tmp_path.iterdir()} == {"target.gguf", "heads"}
