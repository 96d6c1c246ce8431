"""The shape of an eagle3 layer, as far as a run is told of it. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.settings import flag


@dataclass(frozen=True)
class LayerArguments:
    """What differs from the usual layer."""

    norm_output: bool = flag(
        False,
        "Let an eagle3 layer go on from its output behind the last norm, and not before it, as "
        "EAGLE-3.1 does. No parameter is added.",
    )

    def check(self, config: HeadsConfig) -> None:
        """Raises ValueError: heads of another kind have no such layer."""
        if self.norm_output and config.kind != "eagle3":
            raise ValueError(
                f"norm_output is said of an eagle3 layer, and {config.kind} heads have none: leave "
                "it out, or set kind eagle3"
            )

    def shaped(self, config: HeadsConfig, hidden_size: int) -> HeadsConfig:
        """The configuration with such a layer, for a target of this width. Raises ValueError: as
        `check`, or a width that no layer has."""
        self.check(config)
        if not self.norm_output:
            return config
        shape = config.decoder or DecoderShape.of_width(hidden_size)
        assert isinstance(shape, DecoderShape)
        return replace(config, decoder=replace(shape, norm_output=True))
