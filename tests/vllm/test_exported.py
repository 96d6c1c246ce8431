"""Heads written in layouts that vLLM reads without this package: it reads all of them, as its
counters show."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

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
        ("eagle3-norm-output", "eagle3", "eagle3", {}),
        ("eagle3-norm-output", "eagle3-speculators", "eagle3", {}),
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


@pytest.mark.parametrize("norm_output", [True, False])
def test_where_steps_go_on_from_is_read(
    checkpoint: Callable[[str], Path],
    simulated: Callable[..., SimulatedChain],
    decode: Callable[..., Decoded],
    tmp_path: Path,
    norm_output: bool,
) -> None:
    """Half of the channels change their signs behind `fc` and behind the last norm, and back again
    before the layer and the vocabulary: the same drafts, but of steps that go on from before that
    norm, which read other signs."""
    kind = "eagle3-norm-output"
    folder = export_heads(checkpoint(kind), tmp_path / "out", "eagle3", target=str(TARGET)).folder
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][::2] *= -1
    tensors["lm_head.weight"][:, ::2] *= -1
    for name in ("norm.weight", "midlayer.hidden_norm.weight"):
        tensors[name][::2] *= -1
    save_file(tensors, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"norm_output": norm_output}))
    decoded = decode(engine_arguments("eagle3", folder, NUM_HEADS))
    assert decoded.texts == simulated(kind).texts
    assert (decoded.counters == counters(simulated(kind))) == norm_output


@has_medusa
def test_a_token_map_wants_the_option_that_the_export_names(
    checkpoint: Callable[[str], Path], decode: Callable[..., Decoded], tmp_path: Path
) -> None:
    exported = export_heads(checkpoint("reduced-shared"), tmp_path / "exported", "vllm")
    assert any("enable_weights_track" in notice for notice in exported.notices)
    with pytest.raises(RuntimeError, match="token_map"):
        decode(engine_arguments("medusa", exported.folder, NUM_HEADS))
