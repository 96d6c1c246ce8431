"""The flags and YAML keys of the hidden-state cache. Light: nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

from medusa_heads.files import expanded
from medusa_heads.settings import flag, one_of

CachedDtype = Literal["auto", "bfloat16", "float8_e4m3fn"]

STREAMED = (
    "a hidden-state cache needs to know all rows, which a stream does not: leave streaming or "
    "hidden_cache off"
)


@dataclass
class CacheArguments:
    """Whether the target's hidden states are read from disk, from where, and how they lie there."""

    hidden_cache: Literal["off", "read", "auto"] = flag(
        "off",
        "Read the target's hidden states from disk in place of running it. read: what medusa-heads "
        "prepare-hidden wrote; auto: write what is not there, then read.",
    )
    hidden_cache_dir: str | None = flag(None, "Cache folder. Default: OUTPUT_DIR/hidden_states.")
    hidden_cache_dtype: CachedDtype = flag(
        "auto",
        "How states lie on disk. auto: as the target computes them, exactly; float8_e4m3fn: a byte "
        "each, with a scale for every position and layer.",
    )

    def __post_init__(self) -> None:
        given: object = self.hidden_cache
        if given is True:
            raise ValueError("hidden_cache true (YAML's on) leaves open which: give read or auto")
        if given is False:  # as YAML reads off
            self.hidden_cache = "off"
        one_of(self, "hidden_cache", ("off", "read", "auto"))
        one_of(self, "hidden_cache_dtype", ("auto", "bfloat16", "float8_e4m3fn"))

    def check(self, *, joint: bool, streaming: bool = False) -> None:
        """Raises ValueError where training would not use what is set, or cannot: joint training has
        no states that last, and the rows of a stream are not known beforehand."""
        if self.hidden_cache == "off":
            for name in ("hidden_cache_dir", "hidden_cache_dtype"):
                if getattr(self, name) not in (None, "auto"):
                    raise ValueError(
                        f"{name} is given but hidden_cache is off: set it to read or auto, or "
                        f"leave {name} out"
                    )
        elif self.hidden_cache_dir is not None and expanded(self.hidden_cache_dir).is_file():
            raise ValueError(
                f"hidden_cache_dir must be a folder, and {self.hidden_cache_dir!r} is a file: "
                "choose another"
            )
        elif joint:
            raise ValueError(
                "joint training changes the target's hidden states, so none can be kept: leave "
                "hidden_cache off"
            )
        elif streaming:
            raise ValueError(STREAMED)
