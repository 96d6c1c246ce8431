"""Eagle3 heads in vLLM's own EAGLE-3, without this package: its counters are as simulated."""

from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_heads.inference.serving.chain import SimulatedChain
from medusa_heads.interop.export import export_heads
from tests.vllm.conftest import Decoded, counters, engine_arguments
from tests.vllm.partly_trained import NUM_HEADS, TARGET


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-features"])
def test_counters_are_as_simulated(
    checkpoint: Callable[[str], Path],
    simulated: Callable[..., SimulatedChain],
    decode: Callable[..., Decoded],
    tmp_path: Path,
    kind: str,
) -> None:
    exported = export_heads(checkpoint(kind), tmp_path / "out", "eagle3", target=str(TARGET))
    decoded = decode(engine_arguments("eagle3", exported.folder, NUM_HEADS))
    assert decoded.texts == simulated(kind).texts
    assert decoded.counters == counters(simulated(kind))
