"""What a target can be trusted to verify: a token tree, only a chain, or nothing.

Names are checked first, then numbers: every node of a small tree against a plain forward of its
own path, on this very model. An architecture that would decode wrongly is so refused at attach
time, not noticed in its output.

Shapes: L leaves, T tokens, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads.compiled import CompiledTarget
from medusa_heads.errors import MedusaWarning, UnsupportedArchitecture
from medusa_heads.inference.row import Row, StopCheck
from medusa_heads.inference.state import DecodingState
from medusa_heads.target import TargetModel
from medusa_heads.tree import TreeShape

Capability = Literal["tree", "chain"]

_PROBE_TREE = TreeShape.from_choices([(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (1, 0, 0)])
_PROBE_CHAIN = TreeShape.from_choices([(0,), (0, 0), (0, 0, 0)])
_PROMPT = 24
_LARGEST_WINDOW_PROBED = 128
# Root mean square over the vocabulary, in standard deviations of the logits. Exact arithmetic gives
# 1e-6 in fp32; a token that sees what it must not shifts them by tenths.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.2

# Attention that goes by cache slot rather than by position in the text, whatever mask is given.
_SLOT_BOUND = {
    "bloom": "its ALiBi bias follows the cache slot, not the position in the text",
    "mpt": "its ALiBi bias follows the cache slot, not the position in the text",
    "gpt_neo": "its local attention window follows the cache slot, not the position in the text",
}

# Where generate() is not what the model's own forward says, there is nothing to be equal to.
_UNLIKE_ITS_GENERATE = {
    "moshi": "its cache drops rows that leave a window, which its attention does not have",
}

_known: weakref.WeakKeyDictionary[Any, dict[type, Capability]] = weakref.WeakKeyDictionary()


def capability(target: TargetModel) -> Capability:
    """Whether the target can verify a tree exactly, or only a chain; tried once a model.

    Raises:
        UnsupportedArchitecture: neither, and why.
    """
    known = _known.setdefault(target.model, {})
    if type(target) not in known:
        try:
            with target.uncompiled() if isinstance(target, CompiledTarget) else nullcontext():
                known[type(target)] = _examine(target)
        except (UnsupportedArchitecture, torch.OutOfMemoryError):
            raise
        # Whatever a model's own code objects to when it is asked for several tokens over a cache.
        except (
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise UnsupportedArchitecture(
                f"{target.config.model_type} fails on several new tokens over a cache "
                f"({type(error).__name__}: {' '.join(str(error).split())[:120]})"
            ) from error
    return known[type(target)]


def _examine(target: TargetModel) -> Capability:
    target.new_cache()  # refuses caches without rows, and attention that takes no mask
    kind = target.config.model_type
    if target.dtype == torch.float32 and _couples_tokens(target):
        raise UnsupportedArchitecture(
            f"{kind} is loaded in 8 bits with a threshold for outliers, which bitsandbytes looks "
            "for in all tokens of a forward together, so that they change each other",
            "load the target with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)",
        )
    if kind in _UNLIKE_ITS_GENERATE:
        raise UnsupportedArchitecture(f"{kind} cannot be followed: {_UNLIKE_ITS_GENERATE[kind]}")
    reason = _SLOT_BOUND.get(kind)
    if getattr(target.config, "alibi", False):
        reason = "its ALiBi bias follows the cache slot, not the position in the text"
    if reason is None and "position_ids" not in _forward_parameters(target):
        reason = "its forward takes no position_ids"
    if reason is None:
        error = probe_error(target, _PROBE_TREE)
        if error <= _tolerance(target):
            return "tree"
        reason = f"a tree's logits differ from plain decoding by {error:.2g} standard deviations"
    error = probe_error(target, _PROBE_CHAIN)
    if error > _tolerance(target):
        raise UnsupportedArchitecture(
            f"{kind} cannot verify drafts exactly ({reason}; as a chain they differ by {error:.2g})"
        )
    warnings.warn(
        f"{kind} verifies a chain of drafts, not a tree: {reason}", MedusaWarning, stacklevel=4
    )
    return "chain"


def _couples_tokens(target: TargetModel) -> bool:
    """Random text need not have an outlier, so the numbers alone would not tell."""
    quantization: Any = getattr(target.model.config, "quantization_config", None)
    if not getattr(quantization, "load_in_8bit", False):
        return False
    return bool(quantization.llm_int8_threshold > 0)


def _forward_parameters(target: TargetModel) -> set[str]:
    return set(inspect.signature(target.model.forward).parameters)


def _tolerance(target: TargetModel) -> float:
    return _TOLERANCE.get(target.dtype, _HALF_TOLERANCE)


@torch.no_grad()
def probe_error(target: TargetModel, shape: TreeShape) -> float:
    """Worst node of a random tree against plain forwards of its path, after a random prompt that is
    longer than any small attention window."""
    window = getattr(target.config, "sliding_window", None)
    chunk = getattr(target.config, "attention_chunk_size", None)
    small = [size for size in (window, chunk) if size and size <= _LARGEST_WINDOW_PROBED]
    past = max([_PROMPT, *(size + _PROMPT // 2 for size in small)])
    random = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(target.vocab_size, (1, past + shape.num_nodes), generator=random).to(
        target.device
    )
    prompt_1T, nodes_1N = ids_1T[:, :past], ids_1T[:, past:]

    tree = shape.tree(nodes_1N)
    cache = target.new_cache(1, past + shape.num_nodes)
    target.model(prompt_1T, **_positions(target, past), past_key_values=cache, use_cache=True)
    if cache.get_seq_length() != past:
        raise UnsupportedArchitecture(
            f"{target.config.model_type} does not keep its rows in the cache it is given"
        )
    row = Row(0, 1, prompt_1T[0], StopCheck(StoppingCriteriaList()))
    state = DecodingState([row], cache, [0])
    state.hidden_BD = torch.zeros(1, target.hidden_size, dtype=target.dtype, device=target.device)
    mask = state.tree_mask(tree)
    verified_NV = target.verify(tree, cache, mask)[0].float()
    return max(
        _relative_error(verified_NV[path], _plain_logits(target, prompt_1T, nodes_1N[:, path]))
        for path in _paths(shape)
    )


def _positions(target: TargetModel, length: int) -> dict[str, Tensor]:
    """Explicit, as generate() passes them: left alone, RoBERTa and kin count from the padding id
    on."""
    if "position_ids" not in _forward_parameters(target):
        return {}
    return {"position_ids": torch.arange(length, device=target.device)[None]}


def _paths(shape: TreeShape) -> list[list[int]]:
    """Every leaf's nodes, from the root."""
    leaves = set(range(shape.num_nodes)) - set(shape.parents)
    return [shape.ancestors_NN[leaf].nonzero().flatten().tolist() for leaf in sorted(leaves)]


def _plain_logits(target: TargetModel, prompt_1T: Tensor, path_1T: Tensor) -> Tensor:
    ids_1T = torch.cat([prompt_1T, path_1T], dim=1)
    positions = _positions(target, ids_1T.shape[1])
    logits_1TV = target.model(ids_1T, **positions, use_cache=False).logits
    plain_TV: Tensor = logits_1TV[0, prompt_1T.shape[1] :].float()
    return plain_TV


def _relative_error(got_TV: Tensor, expected_TV: Tensor) -> float:
    rms_T = (got_TV - expected_TV).square().mean(dim=-1).sqrt()
    scale_T = expected_TV.std(dim=-1).clamp_min(1e-6)
    error = float((rms_T / scale_T).max())
    return error if error == error else float("inf")  # NaN is no agreement
