"""What earlier versions wrote is read as they meant it, or a sentence says what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.checkpoint.stored_heads import SIDECAR_FILE, read_stored
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import new_heads
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama


def test_a_sidecar_without_a_checksum_is_told_apart_from_a_copy_that_was_cut_off(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    target = TargetModel(tiny_llama())
    save_heads(tmp_path, new_heads(target, HeadsConfig(num_heads=2)), target)
    sidecar = json.loads((tmp_path / SIDECAR_FILE).read_text())
    del sidecar["weights_sha256"]
    (tmp_path / SIDECAR_FILE).write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match=r"says no weights_sha256, .*: train the heads anew$"):
        read_stored(tmp_path)
