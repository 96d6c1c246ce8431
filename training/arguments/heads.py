"""The flags and YAML keys of heads. Light: nothing here imports torch or transformers."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from medusa_heads.errors import at_least

if TYPE_CHECKING:
    from medusa_heads.config import HeadsConfig


@dataclass
class HeadsArguments:
    """What the heads look like."""

    kind: Literal["medusa", "hydra"] = field(
        default="medusa",
        metadata={
            "help": "Independent heads (medusa), or heads that also see the drafts before them "
            "(hydra). vLLM serves medusa heads only."
        },
    )
    num_heads: int = field(
        default=4, metadata={"help": "Number of heads; each looks one token further ahead."}
    )
    num_layers: int = field(default=1, metadata={"help": "Residual blocks in each head."})
    vocab_matrix: Literal["shared", "own"] = field(
        default="shared",
        metadata={
            "help": "Project with the target's lm_head, or with a trained copy for each head."
        },
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Draft only so many tokens, the commonest of the training text. Default: all."
        },
    )
    prefix_attention: bool = field(
        default=False,
        metadata={
            "help": "Give the heads a layer that attends over the text so far. Such heads guess "
            "better, and no other engine can serve them."
        },
    )
    with_vocab_matrix: bool = field(
        default=False,
        metadata={
            "help": "Lay a copy of the target's vocabulary matrix beside heads that share it, with "
            "which vLLM 0.32 reads the folder as it is. Default: the heads alone."
        },
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "num_heads", "num_layers")

    def config(self) -> "HeadsConfig":
        """The same as a HeadsConfig."""
        from medusa_heads.config import HeadsConfig

        return HeadsConfig(
            kind=self.kind,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            vocab_matrix=self.vocab_matrix,
            draft_vocab_size=self.draft_vocab_size,
            prefix_attention=self.prefix_attention,
        )
