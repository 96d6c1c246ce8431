"""What comes back: answers, how they were drawn, who gives them, and the count of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_heads.data.prompts import until_end
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.settings import at_least

# Why a prompt was asked in vain.
EMPTY = "empty answer"
SERVER_ERROR = "server error"
REFUSED = "refused by the server"
BROKEN_TEXT = "text that the target's tokenizer does not give back"
OVERLONG = "longer than asked for"
CUT_TEXT = "reasoning cut off by the server"
CUT_CALLS = "tool calls cut out by the server"
# Why it was not asked at all.
TOO_LONG = "too long for the target's context"
TEMPLATE = "refused by the chat template"
NO_QUESTION = "nothing to answer"
NO_CONVERSATION = "no conversation"
UNKNOWN_TOKENS = "tokens that the target does not have"
EARLIER_TURN = "an earlier turn has no answer"
# Another run may be luckier with these: they are not kept on disk.
PASSING = frozenset({SERVER_ERROR, REFUSED, OVERLONG})
SPECIAL_INSIDE = "an earlier answer is not plain text"
# What is said of an answer that is used all the same.
OTHER_TOKENS = "answers the server counts other tokens in"
OTHER_PROMPT = "prompts the server counts other tokens in"


@dataclass(frozen=True)
class Answer:
    """The target's tokens, its end token included where it ended its text."""

    tokens: Sequence[int] = ()
    failure: str | None = None  # why there is no answer
    detail: str = ""  # of the failure, for a reader
    remarks: tuple[str, ...] = ()  # what is odd about it


@dataclass(frozen=True)
class Sampling:
    """How answers are made; equal settings and prompts give equal answers."""

    max_new_tokens: int
    temperature: float = 0.7  # of answers that are drawn
    seed: int = 0
    top_p: float | None = None  # of answers that are drawn; None: what the target is configured for
    top_k: int | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "max_new_tokens")
        if self.temperature <= 0.0:
            raise ValueError(
                f"expected a temperature above 0, got {self.temperature}: for greedy text alone "
                "set greedy_share to 1"
            )

    def warpers(self) -> dict[str, float]:
        """What answers are drawn with, by the names that transformers and servers give it."""
        named = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in named.items() if value is not None}


Answers = list[tuple[Prompt, Answer]]
OnTokens = Callable[[int], object]
Take = Callable[[int], list[Prompt]]
"""Gives so many prompts. Fewer, or none, if there are no more now: an answer that is given back may
bring the next turn of its conversation. Where all are answered and there are none, there are no
more."""

_LISTED = 1000


class Backend(ABC):
    """Who answers."""

    max_positions: int | None
    """Longest text, prompt and answer together, where it is known."""

    vocab_size: int | None = None
    """How many tokens there are, where it is known."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Everything about it that decides an answer, as plain values."""

    @abstractmethod
    def answer(self, take: Take, sampling: Sampling, on_tokens: OnTokens) -> Iterator[Answers]:
        """Answer each prompt once, in any order, and take no more of them than it needs at hand;
        gives answers as they are finished, and says how many tokens were made meanwhile."""


def as_answer(tokens: Sequence[int], ends: Collection[int]) -> Answer:
    """The answer up to its first end token."""
    tokens = until_end(tokens, ends)
    if not tokens or tokens[0] in ends:
        return Answer(failure=EMPTY)
    return Answer(tokens)


@dataclass
class Accounting:
    """Every answer that was asked for is done, failed or skipped."""

    asked: int = 0  # a conversation may want several
    done: int = 0
    reused: int = 0  # of those done, how many an earlier run had made
    tokens: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    remarks: Counter[str] = field(default_factory=Counter)  # by what is odd
    problems: list[dict[str, Any]] = field(default_factory=list)  # the first 1000 that are not done

    def answered(self, answer: Answer, row: int, turn: int, *, reused: bool) -> None:
        """Count what came back."""
        if answer.failure is not None:
            self.missed("failed", answer.failure, row, turn, answer.detail)
            return
        self.done += 1
        self.reused += reused
        self.tokens += len(answer.tokens)
        self.remarks.update(answer.remarks)

    def missed(self, outcome: str, reason: str, row: int, turn: int, detail: str) -> None:
        """Count what has "failed", or was "skipped" and not asked at all."""
        getattr(self, outcome)[reason] += 1
        if len(self.problems) < _LISTED:
            self.problems.append(
                {"row": row, "turn": turn, "outcome": outcome, "reason": reason, "detail": detail}
            )

    def check(self) -> None:
        """The books balance."""
        assert self.asked == self.done + self.failed.total() + self.skipped.total(), self

    def __str__(self) -> str:
        reused = f" ({self.reused} of them by an earlier run)" if self.reused else ""
        parts = [f"asked {self.asked} = done {self.done}{reused}"]
        for name, reasons in (("failed", self.failed), ("skipped", self.skipped)):
            named = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            parts.append(f"{name} {reasons.total()}" + (f" ({named})" if named else ""))
        odd = "".join(f"; {count} {remark}" for remark, count in self.remarks.most_common())
        return " + ".join(parts) + f"; {self.tokens:,} tokens{odd}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, totals first."""
        totals = {name: getattr(self, name).total() for name in ("failed", "skipped")}
        return {
            "asked": self.asked,
            "done": self.done,
            **totals,
            "reused": self.reused,
            "tokens": self.tokens,
            **{f"{name}_by_reason": dict(getattr(self, name)) for name in totals},
            "remarks": dict(self.remarks),
            "problems": self.problems,
        }
