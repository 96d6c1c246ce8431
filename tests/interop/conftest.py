"""A target on disk, and the comparison that all conversions must pass."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from medusa_heads import MedusaModel, TargetModel
from tests.conftest import TinyLlama


class Decodes(Protocol):
    """Fails unless a checkpoint, loaded with the target it names (or another), writes what the
    target alone would."""

    def __call__(self, checkpoint: Path, named: str | None = None) -> None: ...


@pytest.fixture(scope="session")
def target(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama's folder."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def decodes(target: Path) -> Decodes:
    prompt = torch.tensor([[5, 17, 3, 42, 8]])

    @cache
    def alone(folder: Path, _written: tuple[tuple[str, int], ...]) -> Any:
        """What a target writes whose files were written then."""
        model: Any = TargetModel.from_pretrained(str(folder), dtype=torch.float32).model
        return model.generate(prompt, max_new_tokens=14, do_sample=False)

    def check(checkpoint: Path, named: str | None = None) -> None:
        model = MedusaModel.from_pretrained(checkpoint, target=named, dtype=torch.float32)
        got: Any = model.generate(prompt, max_new_tokens=14, do_sample=False)
        folder = Path(named or target)
        written = sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())
        assert torch.equal(got, alone(folder, tuple(written)))

    return check
