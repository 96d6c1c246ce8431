"""Heads that llama.cpp drafts with: the text stays the target's, and it accepts as many drafts as a
simulation says."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from medusa_heads.inference.serving.chain import simulate_chain
from medusa_heads.interop.export import export_heads
from tests.llama_cpp.target_file import write_target
from tests.vllm.partly_trained import NUM_HEADS, load, load_target, prompts, train

COUNT, NEW_TOKENS = 2, 28  # prompts and what is written behind each
TIES = 1  # of two drafts, which are decided by rounding; seen were none
ENGINE = Path(__file__).with_name("engine.py")
KINDS = [
    pytest.param("eagle3-side-by-side", "draft-eagle3"),
    pytest.param("block-corrected", "draft-dspark", marks=pytest.mark.slow),
    pytest.param("block-yarn", "draft-dspark", marks=pytest.mark.slow),
    pytest.param("eagle3-bare", "draft-eagle3", marks=pytest.mark.slow),
    pytest.param("block", "draft-dflash", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama_cpp")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return write_target(folder / "target.gguf")


def served(target: Path, draft: Path | None = None, way: str | None = None) -> dict[str, Any]:
    """Texts and counters of llama.cpp."""
    asked = {
        "target": str(target),
        "draft": None if draft is None else str(draft),
        "way": way,
        "draft_tokens": NUM_HEADS,
        "prompts": prompts(COUNT),
        "new_tokens": NEW_TOKENS,
    }
    command = [sys.executable, str(ENGINE), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@cache
def plain(target: Path) -> list[list[int]]:
    texts: list[list[int]] = served(target)["texts"]
    return texts


@pytest.mark.parametrize(("kind", "way"), KINDS)
def test_it_accepts_what_the_simulation_accepts(
    kind: str, way: str, folder: Path, target: Path
) -> None:
    checkpoint = train(kind, folder / kind, COUNT, NEW_TOKENS)
    exported = export_heads(checkpoint, folder / f"{kind}-out", "gguf", target_gguf=str(target))
    (file,) = exported.folder.iterdir()
    (notice,) = exported.notices
    assert f"-md {file} --spec-type {way} --spec-draft-n-max {NUM_HEADS}" in notice
    model = load_target()
    simulated = simulate_chain(
        model, load(checkpoint, model), prompts(COUNT), max_new_tokens=NEW_TOKENS, past_end=False
    )
    got = served(target, file, way)
    assert got["texts"] == simulated.texts == plain(target)
    counted, expected = got["accepted"], simulated.accepted
    print(f"{kind}: {counted} of {got['draft_tokens']}, {expected} of {simulated.draft_tokens}")
    assert abs(counted - expected) <= TIES
    assert abs(got["draft_tokens"] - simulated.draft_tokens) <= TIES * (NUM_HEADS + 1)
    assert 0.02 < simulated.accepted / simulated.draft_tokens < 0.9  # else it would tell little

    # A matrix whose halves change places changes the counters, and never the text.
    swap_rows(file, "fc.weight")
    spoilt = served(target, file, way)
    assert spoilt["texts"] == got["texts"] and spoilt["accepted"] < expected - 2 * TIES


def swap_rows(file: Path, name: str) -> None:
    """The halves of a matrix in a GGUF file change places."""
    (tensor,) = (each for each in GGUFReader(file).tensors if each.name == name)
    swapped = np.roll(tensor.data, len(tensor.data) // 2, axis=0)
    with file.open("r+b") as raw:
        raw.seek(tensor.data_offset)
        raw.write(swapped.tobytes())


@pytest.mark.slow
def test_a_quantised_target_keeps_its_text(folder: Path) -> None:
    target = write_target(folder / "q8.gguf", "Q8_0")
    checkpoint = folder / "block-corrected"
    if not checkpoint.exists():
        train("block-corrected", checkpoint, COUNT, NEW_TOKENS)
    exported = export_heads(checkpoint, folder / "on-q8", "gguf", target_gguf=str(target))
    assert "known by its sizes alone" in exported.notices[0]
    (file,) = exported.folder.iterdir()
    got = served(target, file, "draft-dspark")
    assert got["texts"] == plain(target) and got["accepted"] > 0
