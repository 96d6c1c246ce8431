"""What is written of blocks, vLLM's own DSpark and DFlash read, and say what ours say.

Their runner needs a GPU: their classes are loaded by their loaders, and run on their CPU kernels,
over a target that is theirs as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from torch import Tensor

from medusa_heads.heads import DraftHeads
from tests.vllm.partly_trained import TARGET
from tests.vllm.written import BLOCKS, FEATURES, exported, text

pytestmark = pytest.mark.skipif(
    tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 33), reason="vLLM 0.32 has no DSpark"
)
SLOTS = 64
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    # There is none here, and nothing of it to free.
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.accelerator, "empty_cache", lambda: None)
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # else a configuration of DSpark is refused
    patch.setattr(_custom_ops, "rms_norm", by_layer(_custom_ops.rms_norm))
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()
    patch.undo()


def by_layer(rms_norm: Any) -> Any:
    """0.33 normalises keys of all layers at once, each with weights of its own; the kernel of 0.32,
    on which its code runs here, would take those of the first for all."""

    def norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        for parts in zip(out, x, weight, strict=True) if weight.ndim == 2 else [(out, x, weight)]:
            rms_norm(*parts, eps)

    return norm


def served(folder: Path, method: str) -> tuple[Any, Any, Any]:
    """vLLM's configuration, target and drafter."""
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model
    from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
        set_eagle3_aux_hidden_state_layers,
    )

    arguments: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    config = EngineArgs(model=str(TARGET), **arguments).create_engine_config()
    # Behind the configuration's own checks, which ask for the runner.
    config.speculative_config = SpeculativeConfig(
        method=method,
        model=str(folder),
        num_speculative_tokens=4,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    with set_current_vllm_config(config):
        target = get_model(vllm_config=config)
        load: Any = load_dspark_model if method == "dspark" else load_dflash_model
        drafter = load(target, config)
    set_eagle3_aux_hidden_state_layers(target, config.speculative_config)
    return config, target, drafter


@contextmanager
def attending(config: Any, layers: dict[str, Any], positions_P: Tensor, causal: bool) -> Any:
    """Within it, layers of attention see one text's slots up to the last of these positions, and
    write their keys and values there; gives the slots."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    first = next(iter(layers.values()))
    spec = FullAttentionSpec(
        block_size=SLOTS,
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        dtype=torch.float32,
    )
    for layer in layers.values():
        if layer.kv_cache.numel() == 0:
            shape = (1, first.num_kv_heads, SLOTS, 2 * first.head_size)
            layer.kv_cache = torch.zeros(shape)
    count, used = len(positions_P), int(positions_P[-1]) + 1
    starts = torch.tensor([0, count], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([used], dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=used,
        block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=positions_P,
        causal=causal,
    )
    builder = CPUAttentionMetadataBuilder(spec, list(layers), config, torch.device("cpu"))
    metadata = builder.build(0, common)
    with set_forward_context(
        dict.fromkeys(layers, metadata),
        config,
        num_tokens=count,
        slot_mapping=dict.fromkeys(layers, positions_P),
    ):
        yield


def layers_of(config: Any, model: Any) -> dict[str, Any]:
    """Layers of attention in a model, by the names that vLLM has for them."""
    own = {id(module) for module in model.modules()}
    known = config.compilation_config.static_forward_context
    return {name: layer for name, layer in known.items() if id(layer) in own}


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_a_block_says_the_same(tmp_path: Path, name: str) -> None:
    to, settings = BLOCKS[name]
    heads, target, folder = exported(tmp_path, to, kind="block", **settings)
    config, their_target, drafter = served(folder, to)
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
        get_eagle3_aux_layers_from_config,
    )
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    layers = get_eagle3_aux_layers_from_config(config.speculative_config)
    assert layers == tuple(layer + 1 for layer in FEATURES)
    ids_1T = text()
    with set_current_vllm_config(config):
        every_T = torch.arange(ids_1T.shape[1])
        with attending(config, layers_of(config, their_target), every_T, causal=True):
            _, features = their_target(ids_1T[0], every_T)
        features_TX = torch.cat(features, dim=-1)
        hidden_1TX = target.hidden(ids_1T)
        expected_TX = hidden_1TX[0, :, : features_TX.shape[1]]
        torch.testing.assert_close(features_TX, expected_TX, **TOLERANCE)
        mask = get_parallel_drafting_token_id(drafter.config)
        anchored = to == "dspark"
        count = heads.config.num_heads + (not anchored)
        own = layers_of(config, drafter)
        for place in (0, 17, 30):
            query_Q = torch.full((count,), mask)
            query_Q[0] = ids_1T[0, place + 1]
            context_S = torch.arange(place + 1)
            ahead_Q = place + 1 + torch.arange(count)
            assert drafter.get_draft_attn_causal() == [False] * heads.config.num_layers
            with attending(config, own, ahead_Q, causal=False):
                states = drafter.combine_hidden_states(features_TX[: place + 1])
                drafter.precompute_and_store_context_kv(states, context_S, context_S)
                found_QD = drafter(query_Q, ahead_Q)[-heads.config.num_heads :]
            expected_KV = ours(heads, hidden_1TX, ids_1T, place)
            if not anchored:
                got_KV = drafter.compute_logits(found_QD)
                got_KV = got_KV[:, heads.token_ids(torch.arange(expected_KV.shape[1]))]
            else:
                before_K = ids_1T[0, place + 1 : place + 1 + heads.config.num_heads]
                bias_KV = drafter.markov_bias(drafter.markov_embed(before_K))
                got_KV = drafter.compute_draft_logits(found_QD) + bias_KV
                best_K = got_KV.argmax(-1)
                assert torch.equal(drafter.map_draft_to_target(best_K), heads.token_ids(best_K))
            torch.testing.assert_close(got_KV, expected_KV, **TOLERANCE)


def ours(heads: DraftHeads, hidden_1TX: Tensor, ids_1T: Tensor, place: int) -> Tensor:
    """Logits of all heads at a place of the text, after its own tokens."""
    encoded_1TE = heads.encode(hidden_1TX, ids_1T)
    following_K = ids_1T[0, place + 1 : place + 1 + heads.config.num_heads]
    return heads(encoded_1TE[0, place], following_K)
