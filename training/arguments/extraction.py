"""The flags of who computes the hidden states that are written. Light: no torch here."""

import os
from dataclasses import dataclass
from typing import Literal

from medusa_heads.settings import flag, mapping, one_of
from medusa_heads.training.arguments.target import TargetArguments

# What the target, the text and the cache say already.
_OURS = ("model", "revision", "dtype", "speculative_config", "kv_transfer_config")


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
