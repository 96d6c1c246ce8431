"""The shape of a decoder layer that heads may have of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from medusa_heads.settings import one_of, sizes, switches

_RULES_OF_POSITIONS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class DecoderShape:
    """Shape of a decoder layer of the heads' own, in the words of transformers' `LlamaConfig`.

    Args:
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size, rms_norm_eps,
            attention_bias, rope_parameters: as there.
        norm_before_residual: the layer's output is added to its normalised input.
        feature_norm: what is normalised of several features before they are made one: `"each"`,
            `"all"` side by side, or `"none"`.

    Raises:
        ValueError: a size below one or beyond reason, or a rule of positions that is not known.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    norm_before_residual: bool = True
    feature_norm: Literal["each", "all", "none"] = "each"
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0}, hash=False
    )

    def __post_init__(self) -> None:
        sizes(self, "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError(
                f"the decoder's {self.num_attention_heads} attention heads must be a multiple of "
                f"its {self.num_key_value_heads} key-value heads, and head_dim {self.head_dim} even"
            )
        switches(self, "attention_bias", "norm_before_residual")
        one_of(self, "feature_norm", ("each", "all", "none"))
        rope, eps = self.rope_parameters, self.rms_norm_eps
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise ValueError(f"rms_norm_eps must be between 0 and 1, got {eps!r}")
        if not isinstance(rope, Mapping) or rope.get("rope_type") not in _RULES_OF_POSITIONS:
            raise ValueError(
                f"rope_parameters must name a rope_type among {list(_RULES_OF_POSITIONS)}, got "
                f"{rope!r}"
            )

    @classmethod
    def from_dict(cls, values: Any) -> DecoderShape:
        """Read what `asdict` wrote. Raises ValueError: it is none such."""
        if not isinstance(values, Mapping):
            raise ValueError(f"decoder must be an object, got {values!r}")
        known = {part.name for part in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown keys {unknown} of the decoder; known: {sorted(known)}")
        needed = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        if missing := [name for name in needed if name not in values]:
            raise ValueError(f"the decoder's shape lacks {missing}")
        return cls(**values)

    @classmethod
    def of_width(cls, hidden_size: int) -> DecoderShape:
        """A layer of a usual shape: heads about 64 wide, a gated MLP of twice the width. Raises
        ValueError: the width is odd."""
        widths = [w for w in range(2, hidden_size + 1, 2) if hidden_size % w == 0]
        if not widths:
            raise ValueError(
                f"eagle3 heads need an even hidden size, this target's is {hidden_size}"
            )
        width = min(widths, key=lambda width: abs(width - 64))
        heads = hidden_size // width
        return cls(heads, heads, width, 2 * hidden_size)

    def llama_config(self, hidden_size: int) -> Any:
        """The layer's configuration as transformers takes it."""
        from transformers import LlamaConfig

        ours = ("norm_before_residual", "feature_norm")
        said = {key: value for key, value in asdict(self).items() if key not in ours}
        config = LlamaConfig(hidden_size=hidden_size, num_hidden_layers=1, **said)
        config._attn_implementation = "sdpa"
        return config
