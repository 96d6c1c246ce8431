"""The flags and YAML keys of text that the target writes itself.

Light: nothing here imports torch or transformers.
"""

from dataclasses import dataclass, field

from medusa_heads.errors import at_least


@dataclass
class DistillArguments:
    """Training on the target's own continuations of the corpus instead of on the corpus."""

    self_distill: bool = field(
        default=False,
        metadata={"help": "Let the target continue prompts from the corpus and learn from that."},
    )
    num_prompts: int = field(default=2048, metadata={"help": "Prompts drawn from the corpus."})
    num_eval_prompts: int = field(
        default=128, metadata={"help": "Prompts drawn from the held-out text."}
    )
    prompt_length: int = field(default=64, metadata={"help": "Tokens of a prompt."})
    continuation_length: int = field(
        default=128, metadata={"help": "Tokens the target writes after each prompt."}
    )
    greedy_share: float = field(
        default=0.5,
        metadata={"help": "Share of prompts continued greedily; the others are sampled."},
    )
    temperature: float = field(default=0.7, metadata={"help": "Temperature of the sampled share."})
    generation_batch_size: int = field(
        default=128, metadata={"help": "Prompts continued at the same time."}
    )
    generation_workers: int = field(
        default=1, metadata={"help": "Processes that share the prompts, on a CPU."}
    )
    distill_cache: str | None = field(
        default=None,
        metadata={"help": "Folder that keeps the continuations. Default: OUTPUT_DIR/distilled."},
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "num_prompts", "num_eval_prompts", "prompt_length")
        at_least(self, 1, "continuation_length", "generation_batch_size")
        at_least(self, 1, "generation_workers")
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share must lie in [0, 1], got {self.greedy_share}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
