"""Which of the target's tokens heads draft, as it is asked for. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from medusa_heads.config import HeadsConfig
from medusa_heads.settings import MOST, flag

DraftVocab = Literal["auto", "all"]
"""As few tokens as the text allows, or every token of the target."""


@dataclass(frozen=True)
class VocabularyArguments:
    """How many tokens. ValueError: neither a word of `DraftVocab` nor a number."""

    draft_vocab_size: str = flag(
        "auto",
        "Draft only so many tokens, the commonest of the training text; or all of the target's; or "
        "auto: the fewest, and at least 4096, that make up 99 of 100 held-out tokens, or all of "
        "them if more than half would be needed.",
    )

    def __post_init__(self) -> None:
        words, given = get_args(DraftVocab), self.draft_vocab_size
        if given in words:
            return
        if not given.isascii() or not given.isdecimal() or len(given) > len(str(MOST)):
            raise ValueError(
                f"draft_vocab_size must be a number of tokens, {' or '.join(words)}, got {given!r}"
            )
        HeadsConfig(draft_vocab_size=int(given))

    def word(self) -> DraftVocab:
        """What is asked for where there is no number."""
        return "all" if self.draft_vocab_size == "all" else "auto"

    def number(self, config: HeadsConfig) -> HeadsConfig:
        """The configuration with the number, where there is one."""
        if self.draft_vocab_size in get_args(DraftVocab):
            return config
        return replace(config, draft_vocab_size=int(self.draft_vocab_size))
