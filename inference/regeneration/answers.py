"""What comes back: answers, how they were drawn, who gives them, and the count of all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from medusa_heads.inference.regeneration.prompts import Prompt

# Why a prompt was asked in vain.
EMPTY = "empty answer"
SERVER_ERROR = "server error"
BROKEN_TEXT = "text that the target's tokenizer does not give back"
CUT_TEXT = "reasoning cut off by the server"
# Why it was not asked at all.
TOO_LONG = "too long for the target's context"
TEMPLATE = "refused by the chat template"
NO_QUESTION = "nothing to answer"
EARLIER_TURN = "an earlier turn has no answer"
# Another run may be luckier with these: they are not kept on disk.
PASSING = frozenset({SERVER_ERROR})
# What is said of an answer that is used all the same.
OTHER_TOKENS = "answers the server counts other tokens in"
OTHER_PROMPT = "prompts the server counts other tokens in"


@dataclass(frozen=True)
class Answer:
    """The target's tokens, its end token included where it ended its text.

    Args:
        tokens: empty where it failed.
        failure: why there is no answer.
        detail: of the failure, for a reader.
        remarks: what is odd about it.
    """

    tokens: Sequence[int] = ()
    failure: str | None = None
    detail: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """How answers are made; equal settings and prompts give equal answers.

    Args:
        max_new_tokens: tokens of an answer at most.
        temperature: of those that are drawn.
        seed: of the draws.

    Raises:
        ValueError: an impossible value.
    """

    max_new_tokens: int
    temperature: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature <= 0.0:
            raise ValueError(
                f"expected a temperature above 0, got {self.temperature}: for greedy text alone "
                "set greedy_share to 1"
            )


Finished = Callable[[Sequence[tuple[Prompt, Answer]]], None]


class Backend(Protocol):
    """Who answers.

    Attributes:
        max_positions: longest text, prompt and answer together, where it is known.
    """

    max_positions: int | None

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Everything about it that decides an answer, as plain values."""

    @abstractmethod
    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        finished: Finished,
        on_tokens: Callable[[int], object],
    ) -> None:
        """Answer each prompt once, in any order; hands over answers as they are finished, and says
        how many tokens were made meanwhile."""


def as_answer(tokens: Sequence[int], ends: Collection[int]) -> Answer:
    """The answer up to its first end token; padding stands behind it."""
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    if not length or (length == 1 and tokens[0] in ends):
        return Answer(failure=EMPTY)
    return Answer(tokens[:length])


@dataclass
class Accounting:
    """Every answer that was asked for is done, failed or skipped.

    Attributes:
        asked: answers wanted; a conversation may want several.
        done: those there are.
        reused: of these, how many an earlier run had made.
        tokens: in the answers.
        failed, skipped: how many, by reason.
        remarks: how many answers are odd, by what is odd.
        problems: row, turn, outcome, reason and detail of each one that is not done.
    """

    asked: int = 0
    done: int = 0
    reused: int = 0
    tokens: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    problems: list[dict[str, Any]] = field(default_factory=list)

    def answered(self, answer: Answer, row: int, turn: int, *, reused: bool) -> None:
        """Count what came back."""
        if answer.failure is not None:
            self.failed[answer.failure] += 1
            self._note(row, turn, "failed", answer.failure, answer.detail)
            return
        self.done += 1
        self.reused += reused
        self.tokens += len(answer.tokens)
        self.remarks.update(answer.remarks)

    def skip(self, reason: str, row: int, turn: int, detail: str = "") -> None:
        """Count what was not asked."""
        self.skipped[reason] += 1
        self._note(row, turn, "skipped", reason, detail)

    def _note(self, row: int, turn: int, outcome: str, reason: str, detail: str) -> None:
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
        return {
            "asked": self.asked,
            "done": self.done,
            "failed": self.failed.total(),
            "skipped": self.skipped.total(),
            "reused": self.reused,
            "tokens": self.tokens,
            "failed_by_reason": dict(self.failed),
            "skipped_by_reason": dict(self.skipped),
            "remarks": dict(self.remarks),
            "problems": self.problems,
        }
