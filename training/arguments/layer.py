"""The shape of an eagle3 layer, as far as a run is told of it. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape, FeatureNorm
from medusa_heads.settings import flag


@dataclass(frozen=True)
class LayerArguments:
    """What differs from the usual layer."""

    norm_output: bool = flag(
        False,
        "Let an eagle3 layer go on from its output behind the last norm, and not before it, as "
        "EAGLE-3.1 does. No parameter is added.",
    )
    feature_norm: FeatureNorm = flag(
        "each",
        "What an eagle3 layer normalises of the features that it reads: each of them, all of them "
        "side by side, which llama.cpp can hold too, or none.",
    )

    def check(self, config: HeadsConfig) -> None:
        """Raises ValueError: heads of another kind have no such layer."""
        said = self._said()
        if said and config.kind != "eagle3":
            raise ValueError(
                f"{min(said)} is said of an eagle3 layer, and {config.kind} heads have none: leave "
                "it out, or set kind eagle3"
            )
        if "feature_norm" in said and config.features is None:
            raise ValueError(
                "feature_norm is said of features, and these heads read none: leave it out, or "
                "give features"
            )

    def shaped(self, config: HeadsConfig, hidden_size: int) -> HeadsConfig:
        """The configuration with such a layer, for a target of this width. Raises ValueError: as
        `check`, or a width that no layer has."""
        self.check(config)
        if not (said := self._said()):
            return config
        shape = config.decoder or DecoderShape.of_width(hidden_size)
        assert isinstance(shape, DecoderShape)
        return replace(config, decoder=replace(shape, **said))

    def _said(self) -> dict[str, Any]:
        """What is not as usual."""
        usual, said = LayerArguments(), vars(self)
        return {name: value for name, value in said.items() if value != getattr(usual, name)}
