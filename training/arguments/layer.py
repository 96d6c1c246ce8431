"""The shape of an eagle3 layer, and what heads read of the target, as far as a run is told of it.
Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape, FeatureNorm
from medusa_heads.settings import flag


@dataclass(frozen=True)
class LayerArguments:
    """What differs from the usual layer, and which layers of the target are read."""

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

    usual_features: bool = flag(
        False,
        "Read three layers of the target, a low, a middle and a high one, where features names "
        "none. Engines that serve heads with features can hand on all three.",
    )

    def reading(self, config: HeadsConfig, num_layers: Callable[[], int]) -> HeadsConfig:
        """The configuration with the features that it reads of a target with so many layers. Raises
        ValueError: there are too few, or nobody can tell."""
        if not self.usual_features or config.features is not None:
            return config
        return replace(config, features=usual_features(num_layers()))

    def check(self, config: HeadsConfig) -> None:
        """Raises ValueError: heads of another kind have no such layer."""
        said = self._said()
        if said and config.kind != "eagle3":
            raise ValueError(
                f"{min(said)} is said of an eagle3 layer, and {config.kind} heads have none: leave "
                "it out, or set kind eagle3"
            )
        if "feature_norm" in said and config.features is None and not self.usual_features:
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
        """What is not as usual of the layer."""
        usual, of_layer = LayerArguments(), ("norm_output", "feature_norm")
        said = {name: getattr(self, name) for name in of_layer}
        return {name: value for name, value in said.items() if value != getattr(usual, name)}


def usual_features(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, counted from 0: of a deep target those that EAGLE-3 reads,
    and never the last one, which llama.cpp does not hand on. Raises ValueError: there are too few.
    """
    if num_layers < 5:
        raise ValueError(
            f"usual_features are three layers of five or more, and the target has {num_layers}: "
            "name them (features)"
        )
    if num_layers < 10:
        return 1, num_layers // 2, num_layers - 2
    return 1, num_layers // 2 - 1, num_layers - 4
