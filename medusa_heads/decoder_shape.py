"""The shape of a decoder layer that heads may have of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from medusa_heads.settings import MOST, one_of, sizes, switches

_RULES_OF_POSITIONS = ("default", "linear", "llama3", "yarn")
_LONGEST = "original_max_position_embeddings"  # what two of them go by
_NUMBERS = (
    "rope_theta", "factor", _LONGEST, "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
)  # fmt: skip
_LATER = (("norm_output", False),)  # what is not written: earlier versions know no such name
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")

FeatureNorm = Literal["each", "all", "none"]

_Shape = TypeVar("_Shape", bound="LayerShape")


def usual_heads(hidden_size: int, need: str) -> int:
    """As many attention heads as make them 64 wide, or the nearest even width that divides. Raises
    ValueError: the hidden size is odd, and what needs another."""
    widths = [w for w in range(2, hidden_size + 1, 2) if hidden_size % w == 0]
    if not widths:
        raise ValueError(f"{need} an even hidden size, this target's is {hidden_size}")
    return hidden_size // min(widths, key=lambda width: abs(width - 64))


@dataclass(frozen=True)
class LayerShape:
    """Shape of decoder layers of the heads' own, in the words of transformers' configurations.
    Raises ValueError: a size below one or beyond reason, or a rule of positions that is not known.

    Args:
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size, rms_norm_eps,
            attention_bias, rope_parameters: as there.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0}, hash=False
    )

    def __post_init__(self) -> None:
        sizes(self, *_SIZES)
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError(
                f"the decoder's {self.num_attention_heads} attention heads must be a multiple of "
                f"its {self.num_key_value_heads} key-value heads, and head_dim {self.head_dim} even"
            )
        switches(self, *(part.name for part in fields(self) if part.type == "bool"))
        rope, eps = self.rope_parameters, self.rms_norm_eps
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise ValueError(f"rms_norm_eps must be between 0 and 1, got {eps!r}")
        if not isinstance(rope, Mapping) or rope.get("rope_type") not in _RULES_OF_POSITIONS:
            raise ValueError(
                f"rope_parameters must name a rope_type among {list(_RULES_OF_POSITIONS)}, got "
                f"{rope!r}"
            )
        if rope["rope_type"] in ("llama3", "yarn") and _LONGEST not in rope:
            raise ValueError(f"rope_parameters of {rope['rope_type']!r} must have {_LONGEST}")
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(
                "rope_parameters turn a part of each head alone (partial_rotary_factor), which "
                "layers here do not"
            )
        for name, number in rope.items():  # else positions turn by no number
            is_number = type(number) in (int, float)
            if number is None or not (is_number or name in _NUMBERS):
                continue
            unsaid = number == 0 and name.startswith("mscale")  # as transformers reads it
            if not unsaid and not (is_number and 0 < number < math.inf):
                raise ValueError(
                    f"rope_parameters: {name} must be a positive number, got {number!r}"
                )

    @classmethod
    def from_dict(cls: type[_Shape], values: Any) -> _Shape:
        """Read what `to_dict` wrote. Raises ValueError: it is none such."""
        if not isinstance(values, Mapping):
            raise ValueError(f"decoder must be an object, got {values!r}")
        known = {part.name for part in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown keys {unknown} of the decoder; known: {sorted(known)}")
        if missing := [name for name in _SIZES if name not in values]:
            raise ValueError(f"the decoder's shape lacks {missing}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` reads them. Versions that know of no norm_output still read
        layers without it."""
        values = asdict(self)
        return {name: value for name, value in values.items() if (name, value) not in _LATER}

    @classmethod
    def of_width(cls: type[_Shape], hidden_size: int) -> _Shape:
        """Layers of a usual shape: a gated MLP of twice the width. Raises ValueError: as
        `usual_heads`."""
        heads = usual_heads(hidden_size, "eagle3 and block heads need")
        return cls(heads, heads, hidden_size // heads, 2 * hidden_size)

    def layer_config(self, of_layer: Any, hidden_size: int, num_layers: int = 1) -> Any:
        """The layers' configuration as transformers takes it, of the class `of_layer`."""
        said = {part.name: getattr(self, part.name) for part in fields(LayerShape)}
        said |= {"rope_parameters": dict(self.rope_parameters)}
        factor, first = (self.rope_parameters.get(name) for name in ("factor", _LONGEST))
        if factor and first:
            # transformers computes nothing by it then, and warns of a length that contradicts them.
            longest = round(min(factor, MOST) * min(first, MOST))
            said["max_position_embeddings"] = longest
        config = of_layer(hidden_size=hidden_size, num_hidden_layers=num_layers, **said)
        config._attn_implementation = "sdpa"
        return config


@dataclass(frozen=True)
class DecoderShape(LayerShape):
    """Shape of an eagle3 layer, a Llama layer."""

    norm_before_residual: bool = True  # the layer's output is added to its normalised input
    # What is normalised of several features before they are made one: `"each"`, `"all"` side by
    # side, or `"none"`.
    feature_norm: FeatureNorm = "each"
    # Each later step reads what stands behind the last norm, as the vocabulary matrix does, and not
    # what came out of the layer before it (EAGLE-3.1).
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "feature_norm", get_args(FeatureNorm))


@dataclass(frozen=True)
class BlockShape(LayerShape):
    """Shape of a block's layers, Qwen3 layers, and what the block reads."""

    # Whose embedding stands for every token that is not known yet; None while no target has been
    # looked at.
    mask_token_id: int | None = None
    # The last known token's query drafts the first token (DSpark), or none (DFlash): then there is
    # one query more than there are heads.
    sample_from_anchor: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        token = self.mask_token_id
        if token is not None and (type(token) is not int or not 0 <= token <= MOST):
            raise ValueError(f"mask_token_id must be the id of a token, got {token!r}")
