"""What a target can be trusted to verify: a token tree, only a chain, or nothing.

Names are checked first, then numbers, on this very model: every node of a small tree against a
plain forward of its own path, and against the same tree with other tokens on all other branches. An
architecture that would decode wrongly is so refused at attach time, not noticed in its output.

Shapes: T tokens, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads.errors import MedusaWarning, UnsupportedArchitecture
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TreeShape

Capability = Literal["tree", "chain"]

_PROBE_TREE = TreeShape.from_choices([(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (1, 0, 0)])
_PROBE_CHAIN = TreeShape.from_choices([(0,), (0, 0), (0, 0, 0)])
_PROMPT = 24
_LARGEST_WINDOW_PROBED = 128
# Root mean square over the vocabulary, in standard deviations of the logits. Forwards of unlike
# shapes round differently: by 1e-6 in fp32, by hundredths in half precision, and by tenths where
# another expert is chosen.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.2
# Forwards of one shape do not even round differently, in any dtype: what a node must not see
# changes nothing of it, or 1e-6 where an expert is handed another number of tokens. One scale for
# all activations in 8 bits shifts even tiny narrow models by 5e-3, a mask not followed by 0.1.
_LEAK_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_HALF_LEAK_TOLERANCE = 2e-3
_NO_EFFECT = 1e-6  # of a plain forward: tokens that were never trained may all be embedded alike

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
    if _is_sharded(target):
        raise UnsupportedArchitecture(
            f"the weights of {kind} are spread over several processes, each of which would measure "
            "its own steps and choose its own drafts, and wait for the others in vain",
            "load it whole in each process, without tp_plan",
        )
    if _couples_tokens(target):
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
        reason = probe(target, _PROBE_TREE).fault(target.dtype)
        if reason is None:
            return "tree"
    fault = probe(target, _PROBE_CHAIN).fault(target.dtype)
    if fault is not None:
        raise UnsupportedArchitecture(
            f"{kind} cannot verify drafts exactly (as a tree, {reason}; as a chain, {fault})"
        )
    warnings.warn(
        f"{kind} verifies a chain of drafts, not a tree: {reason}", MedusaWarning, stacklevel=4
    )
    return "chain"


def _is_sharded(target: TargetModel) -> bool:
    if (getattr(target.model, "_tp_size", None) or 1) > 1:
        return True
    # However it came about: what processes share are DTensors.
    return any(hasattr(parameter, "full_tensor") for parameter in target.model.parameters())


def _couples_tokens(target: TargetModel) -> bool:
    """Random text need not have an outlier, so the numbers alone would not tell."""
    quantization: Any = getattr(target.model.config, "quantization_config", None)
    if not getattr(quantization, "load_in_8bit", False):
        return False
    return bool(quantization.llm_int8_threshold > 0)


def _forward_parameters(target: TargetModel) -> set[str]:
    return set(inspect.signature(target.model.forward).parameters)


@dataclass(frozen=True)
class Probe:
    """What a target made of a small tree, in standard deviations of the logits.

    Attributes:
        error: worst difference of a node from a plain forward of its path.
        leak: worst change of a node when only tokens change that it must not see.
        effect: least change of a leaf when tokens change that it must see.
    """

    error: float
    leak: float
    effect: float

    def fault(self, dtype: torch.dtype) -> str | None:
        """What speaks against verifying such trees; None if nothing does."""
        if not self.error <= _TOLERANCE.get(dtype, _HALF_TOLERANCE):  # NaN is no agreement
            return f"its logits differ from plain decoding by {self.error:.2g} standard deviations"
        if not self.leak <= _LEAK_TOLERANCE.get(dtype, _HALF_LEAK_TOLERANCE):
            return (
                f"a token's logits change by {self.leak:.2g} standard deviations with tokens that "
                "it must not see: the tree's mask is not followed, or all activations of a forward "
                "share one scale"
            )
        if not self.effect > self.leak:
            return "a token's logits do not change with the tokens before it"
        return None


@torch.no_grad()
def probe(target: TargetModel, shape: TreeShape) -> Probe:
    """Verify a random tree after a random prompt that is longer than any small attention window."""
    window = getattr(target.config, "sliding_window", None)
    chunk = getattr(target.config, "attention_chunk_size", None)
    small = [size for size in (window, chunk) if size and size <= _LARGEST_WINDOW_PROBED]
    past = max([_PROMPT, *(size + _PROMPT // 2 for size in small)])
    random = torch.Generator().manual_seed(0)
    ids_2T = torch.randint(target.vocab_size, (2, past + shape.num_nodes), generator=random)
    prompt_1T = ids_2T[:1, :past].to(target.device)
    nodes_1N, others_1N = ids_2T[:, past:].to(target.device).split(1)

    cache = target.new_cache(1, past + shape.num_nodes)
    target.model(prompt_1T, **_positions(target, past), past_key_values=cache, use_cache=True)
    if cache.get_seq_length() != past:
        raise UnsupportedArchitecture(
            f"{target.config.model_type} does not keep its rows in the cache it is given"
        )
    row = Row(0, 1, prompt_1T[0], StopCheck(StoppingCriteriaList()))
    state = DecodingState([row], cache, [0])
    state.hidden_BD = torch.zeros(1, target.hidden_size, dtype=target.dtype, device=target.device)

    def verified(kept: list[int]) -> Tensor:
        """Logits [N, V] of the tree, in which all nodes but these hold other tokens."""
        tokens_1N = others_1N.clone()
        tokens_1N[:, kept] = nodes_1N[:, kept]
        tree = shape.tree(tokens_1N)
        return target.verify(tree, cache, state.tree_mask(tree))[0].float()

    logits_NV = verified(list(range(shape.num_nodes)))
    paths = _paths(shape)
    errors = [
        _relative_error(logits_NV[path], _plain_logits(target, prompt_1T, nodes_1N[:, path]))
        for path in paths
    ]
    # The root alone as well: a chain has no other branch.
    leaks = [_relative_error(verified(path)[path], logits_NV[path]) for path in [*paths, [0]]]
    ends = [path[-1] for path in paths]
    changed_NV = verified([0, *ends])
    effects = [_relative_error(changed_NV[[end]], logits_NV[[end]]) for end in ends]
    for i, path in enumerate(paths):
        if effects[i] <= max(leaks):
            changed_1N = others_1N[:, path].clone()
            changed_1N[:, [0, -1]] = nodes_1N[:, [0, path[-1]]]
            plain_NV = _plain_logits(target, prompt_1T, changed_1N)
            if _relative_error(plain_NV[[-1]], logits_NV[[path[-1]]]) <= _NO_EFFECT:
                effects[i] = float("inf")  # to the target itself these tokens are all the same
    return Probe(max(errors), max(leaks), min(effects))


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
