"""The flags and YAML keys of the hidden-state cache. Light: nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

from medusa_heads.settings import flag, one_of


@dataclass
class CacheArguments:
    """Whether the target's hidden states are kept on disk, and where."""

    hidden_cache: Literal["off", "read", "write", "auto"] = flag(
        "off",
        "Keep the target's hidden states on disk. auto: use what is there, compute and write the "
        "rest; write: begin anew; read: the target never runs, all must be there.",
    )
    hidden_cache_dir: str | None = flag(None, "Cache folder. Default: OUTPUT_DIR/hidden_states.")

    def __post_init__(self) -> None:
        one_of(self, "hidden_cache", ("off", "read", "write", "auto"))
        if self.hidden_cache == "off" and self.hidden_cache_dir is not None:
            raise ValueError(
                "hidden_cache_dir is given but hidden_cache is off: set it to auto, or leave the "
                "folder out"
            )

    def check(self, *, joint: bool) -> None:
        """Raises ValueError where a cache is wished for in joint training."""
        if joint and self.hidden_cache != "off":
            raise ValueError(
                "joint training changes the target's hidden states, so none can be kept: leave "
                "hidden_cache off"
            )
