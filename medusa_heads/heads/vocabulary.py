"""A target's vocabulary: its lm_head, its token embeddings, and which tokens are worth drafting.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, TypeGuard

from torch import Tensor

# Under these names configurations say what a target's logits are multiplied by (Cohere, Falcon-H1;
# Granite): factors and divisors with their powers.
_FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "output_multiplier": 1, "logits_scaling": -1}
# By such a name HyperCLOVA X multiplies where Granite divides; MiniCPM3 divides what its lm_head
# reads, as heads read it; and MPT in transformers does nothing.
_OTHERWISE = {
    "hyperclovax": {"logits_scaling": 1},
    "minicpm3": {"logits_scaling": 0},
    "mpt": {"logit_scale": 0},
}


class HasVocabulary(Protocol):
    """What heads need of a target: a TargetModel, or any transformers causal LM."""

    def get_output_embeddings(self) -> Any:
        """The lm_head: a module with `weight` [V, D] and `bias` [V] or None."""


def vocabulary(target: HasVocabulary) -> tuple[Tensor, Tensor | None]:
    """The lm_head's weight [V, D] and bias [V] or None; ValueError where it is quantised, no
    matrix, or not all: an adapter adds to it."""
    lm_head = target.get_output_embeddings()
    _check_merged(lm_head, "lm_head")
    weight_VD = getattr(lm_head, "weight", None)
    if not is_plain(weight_VD) or weight_VD.ndim != 2:
        raise ValueError(
            "the target must have an unquantised lm_head of shape [vocab_size, hidden_size], got "
            f"{type(lm_head).__name__}: load the target with its lm_head left out of quantisation"
        )
    bias_V = getattr(lm_head, "bias", None)
    return weight_VD.detach(), None if bias_V is None else bias_V.detach()


def logit_scale(config: Any) -> float:
    """What a target multiplies its lm_head's products by, as its configuration says."""
    scale, otherwise = 1.0, _OTHERWISE.get(getattr(config, "model_type", ""), {})
    for name, power in (_FACTORS | otherwise).items():
        if power:
            scale *= float(getattr(config, name, None) or 1) ** power
    return scale


def scaled(x: Tensor, scale: float) -> Tensor:
    """The same tensor where the scale is 1, as of most targets."""
    return x if scale == 1 else x * scale


def is_plain(weight: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor of numbers that are not quantised: of integers, in 8 bits, or in
    parts that show themselves as one tensor (torchao, quanto)."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.itemsize == 1:
        return False
    return not hasattr(weight, "__tensor_flatten__") or hasattr(weight, "full_tensor")


def _check_merged(module: object, name: str) -> None:
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")  # no adapter where nobody imported it
    if peft is None or not isinstance(module, peft.BaseTunerLayer):
        return
    adapter: Any = module
    if not (adapter.merged or adapter.disable_adapters):
        raise ValueError(
            f"an adapter changes the target's {name}, which heads share: merge it first "
            "(merge_and_unload)"
        )


def embeddings(target: HasVocabulary, hidden_size: int) -> Tensor:
    """The token embeddings [V, D]; ValueError where they are quantised, not as wide as the hidden
    state, or not all: an adapter adds to them."""
    model: Any = target
    module = model.get_input_embeddings()
    _check_merged(module, "token embeddings")
    weight_VD = getattr(module, "weight", None)
    if not is_plain(weight_VD) or weight_VD.shape[1:] != (hidden_size,):
        raise ValueError(
            "hydra, block and eagle3 heads, prefix attention and induction need a target with "
            f"unquantised token embeddings as wide as its hidden state of {hidden_size}: use kind "
            "'medusa' without prefix_attention and induction"
        )
    return weight_VD.detach()


def frequent_tokens(counts_V: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids, ascending: a reduced vocabulary (FR-Spec, Zhao et al.
    2025, arXiv:2502.14856). Of equally frequent ones the lower id is taken."""
    if not 1 <= size <= len(counts_V):
        raise ValueError(f"draft_vocab_size must lie between 1 and {len(counts_V)}, got {size}")
    return counts_V.argsort(descending=True, stable=True)[:size].sort().values
