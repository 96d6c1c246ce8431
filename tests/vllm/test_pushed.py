"""A checkpoint that was pushed to a hub and pulled from it: vLLM loads the same folder as we do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medusa_heads import MedusaModel
from medusa_heads.hub.pull import pull
from medusa_heads.hub.push import prepare_push, push
from medusa_heads.inference.serving.chain import SimulatedChain
from tests.hub.hub_server import LocalHub, log_in
from tests.vllm.conftest import Decoded, counters, engine_arguments, has_medusa
from tests.vllm.partly_trained import NUM_HEADS, TARGET

TOKEN = "hf_alicealicealice"


@pytest.mark.parametrize("kind", ["shared", "own"])
@pytest.mark.parametrize("method", [pytest.param("medusa", marks=has_medusa), "custom_class"])
def test_one_folder_for_us_and_for_vllm(
    checkpoint: Callable[[str], Path],
    simulated: Callable[..., SimulatedChain],
    decode: Callable[..., Decoded],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    method: str,
) -> None:
    with LocalHub({TOKEN: "alice"}) as hub:
        log_in(hub, TOKEN, tmp_path, monkeypatch)
        prepared = prepare_push(
            checkpoint(kind),
            "alice/heads",
            base_model="alice/target",
            with_vocab_matrix=kind == "shared",
        )
        push(prepared)
        pulled = pull("alice/heads", tmp_path / "pulled")
    decoded = decode(engine_arguments(method, pulled, NUM_HEADS))
    assert decoded.texts == simulated(kind).texts
    assert decoded.counters == counters(simulated(kind))

    model = MedusaModel.from_pretrained(pulled, target=str(TARGET), dtype=torch.float32)
    ids_1T = torch.tensor([[15, 30, 7, 15, 30]])
    options = {"max_new_tokens": 40, "do_sample": False}
    expected_1T = model.target.model.generate(ids_1T, **options)  # type: ignore[operator]
    assert torch.equal(model.generate(ids_1T, **options), expected_1T)  # type: ignore[arg-type]
