"""How large a target's matrices are: what the speed of multiplying them depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal LM. The defaults are those of a small one.

    Attributes:
        hidden: width of the hidden states.
        intermediate: width within an MLP.
        vocab: rows of the lm_head.
        layers: how many there are.
        experts: MLPs in each layer.
    """

    hidden: int = 1024
    intermediate: int = 2816
    vocab: int = 32000
    layers: int = 16
    experts: int = 1

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Of a transformers configuration; what it does not say is taken to be usual."""
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        hidden = _number(config, "hidden_size", "n_embd", "d_model") or cls.hidden
        intermediate = _number(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
        experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts") or 1
        if experts > 1:
            intermediate = _number(config, "moe_intermediate_size") or intermediate
        return cls(
            hidden=hidden,
            intermediate=intermediate,
            vocab=_number(config, "vocab_size") or cls.vocab,
            layers=_number(config, "num_hidden_layers", "n_layer", "num_layers") or cls.layers,
            experts=experts,
        )

    @property
    def parameters(self) -> int:
        """About how many weights there are."""
        attention, expert = 3 * self.hidden**2, 3 * self.hidden * self.intermediate
        return 2 * self.vocab * self.hidden + self.layers * (attention + self.experts * expert)


def _number(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
