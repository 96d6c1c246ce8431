"""Heads written in layouts that vLLM reads without this package: it reads all of them, as its
counters show."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_heads.inference.serving.chain import SimulatedChain
from medusa_heads.interop import WrittenFormat
from medusa_heads.interop.export import export_heads
from tests.vllm.conftest import Decoded, counters, engine_arguments, has_medusa
from tests.vllm.partly_trained import NUM_HEADS, TARGET

TOKEN_MAP: dict[str, Any] = {"model_loader_extra_config": {"enable_weights_track": False}}


@pytest.mark.parametrize(
    ("kind", "layout", "method", "options"),
    [
        pytest.param("shared", "vllm", "medusa", {}, marks=has_medusa),
        pytest.param("own", "vllm", "medusa", {}, marks=has_medusa),
        pytest.param("reduced-shared", "vllm", "medusa", TOKEN_MAP, marks=has_medusa),
        ("eagle3", "eagle3", "eagle3", {}),
        ("eagle3-features", "eagle3", "eagle3", {}),
    ],
)
def test_counters_are_as_simulated(
    checkpoint: Callable[[str], Path],
    simulated: Callable[..., SimulatedChain],
    decode: Callable[..., Decoded],
    tmp_path: Path,
    kind: str,
    layout: WrittenFormat,
    method: str,
    options: dict[str, Any],
) -> None:
    exported = export_heads(checkpoint(kind), tmp_path / "exported", layout, target=str(TARGET))
    decoded = decode(engine_arguments(method, exported.folder, NUM_HEADS) | options)
    assert decoded.texts == simulated(kind).texts
    assert decoded.counters == counters(simulated(kind))


@has_medusa
def test_a_token_map_wants_the_option_that_the_export_names(
    checkpoint: Callable[[str], Path], decode: Callable[..., Decoded], tmp_path: Path
) -> None:
    exported = export_heads(checkpoint("reduced-shared"), tmp_path / "exported", "vllm")
    assert any("enable_weights_track" in notice for notice in exported.notices)
    with pytest.raises(RuntimeError, match="token_map"):
        decode(engine_arguments("medusa", exported.folder, NUM_HEADS))
