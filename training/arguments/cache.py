"""The flags and YAML keys of the hidden-state cache, and of who computes it. Light: no torch."""

import os
from dataclasses import dataclass
from typing import Literal

from medusa_heads.files import expanded
from medusa_heads.settings import flag, mapping, one_of
from medusa_heads.training.arguments.target import TargetArguments

CachedDtype = Literal["auto", "bfloat16", "float8_e4m3fn"]

STREAMED = (
    "a hidden-state cache needs to know all rows, which a stream does not: leave streaming or "
    "hidden_cache off"
)
# What the target, the text and the cache say already.
_OURS = ("model", "revision", "dtype", "speculative_config", "kv_transfer_config")


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


@dataclass
class ExtractionArguments:
    """Who runs the target."""

    backend: Literal["transformers", "vllm"] = flag(
        "transformers", "Who computes: the target's own forwards, or vLLM in this process."
    )
    engine_args: dict | str | None = flag(
        None, "Arguments of vllm.LLM, for the backend vllm: a YAML mapping, or JSON."
    )

    def __post_init__(self) -> None:
        one_of(self, "backend", ("transformers", "vllm"))
        self.engine_args = given = mapping(self, "engine_args")
        if given and self.backend != "vllm":
            raise ValueError(
                "engine_args is read by the backend vllm alone: leave it out, or set --backend vllm"
            )
        if taken := [name for name in _OURS if name in given]:
            raise ValueError(f"engine_args cannot set {taken[0]}: leave it out")

    def check(self, to_target: TargetArguments, *, self_distill: bool) -> None:
        """Raises ValueError where the launch or the flags want of vLLM what it does not do so."""
        if self.backend != "vllm":
            return
        if self_distill:
            raise ValueError(
                "self_distill has the target write text here: let vLLM write it first, by "
                "medusa-heads regenerate --backend vllm, and give that as --dataset"
            )
        if flags := [*to_target.apart, *(["load_in_4bit"] if to_target.load_in_4bit else [])]:
            raise ValueError(
                f"vLLM lays the target out itself: leave {flags[0]} out, and say so in engine_args "
                "(tensor_parallel_size, quantization)"
            )
        if (attention := to_target.attn_implementation) not in (None, "sdpa", "eager"):
            raise ValueError(
                f"vLLM's states are compared with the target's on the CPU, where {attention} does "
                "not run: leave attn_implementation out"
            )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "vLLM starts its own processes: leave the launcher out, and give engine_args a "
                "tensor_parallel_size"
            )
