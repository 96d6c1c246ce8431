"""Prompts to generate from: a user's file, or windows of the embedded held-out packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_heads.data.chat import ask_ids
from medusa_heads.data.encoding import prompt_ids
from medusa_heads.files import expanded, half_character, parse_json


@dataclass(frozen=True)
class Question:
    """What somebody asks, before it is made into tokens."""

    turns: tuple[str, ...]  # one behind the other, each behind the answer to the one before
    category: str | None = None  # what kind of text it is, where the file says so
    chat: bool = False  # asked through the target's chat template, where it has one
    system: str | None = None  # what stands before the first turn of a chat


@dataclass(frozen=True)
class Prompt:
    """Token ids to generate from."""

    tokens: tuple[int, ...]
    category: str | None = None  # see Question
    # Makes the next turn's prompt of the tokens that answered this one.
    follow_up: Callable[[list[int]], Prompt] | None = None


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase, *, num_prompts: int, prompt_length: int, seed: int
) -> list[list[int]]:
    """Token ids of prompts from the standard library packages that nothing here trains on. Raises
    ValueError: more or longer prompts than those packages hold."""
    from medusa_heads.data.corpus import draw_windows, library_files

    texts = [file["text"] for file in library_files("held_out")]
    windows = draw_windows(
        texts, tokenizer, num_prompts=num_prompts, prompt_length=prompt_length, seed=seed
    )
    return [input_ids for _, input_ids in windows]


def read_questions(file: str | Path) -> list[Question]:
    """Questions of a file: `.jsonl`, or one a line.

    An object of a `.jsonl` file has a string under `prompt` or `text`, a list of them under `turns`
    as in Spec-Bench's `question.jsonl`, or `messages`, of which those of the user are asked, and
    answered by the target; `category` may be beside it. Raises ValueError: the file is missing,
    holds no prompt, or a line that cannot be read."""
    path = expanded(file)
    if not path.is_file():
        raise ValueError(f"expected a file of prompts at {str(file)!r}, found none")
    try:
        # Not at every character that str.splitlines() takes for the end of a line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8") from error
    if (suffix := path.suffix.lower()) == ".json":
        raise ValueError(f"{path} may be one object over many lines: save it as .jsonl, one a line")
    is_json = suffix == ".jsonl"
    questions = [
        _json_question(line, f"{path}, line {number}") if is_json else Question((line,))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise ValueError(f"{path} holds no prompts: write one a line")
    return questions


def _json_question(line: str, place: str) -> Question:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON ({error})") from error
    row = row if isinstance(row, dict) else {}
    chat = not row.keys().isdisjoint(("turns", "messages"))
    system: str | None = None
    turns: Any
    if "messages" in row:
        system, turns = _asked(row["messages"], place)
    else:
        turns = row["turns"] if chat else [row.get("prompt", row.get("text"))]
    if not isinstance(turns, list) or not turns or not all(t and isinstance(t, str) for t in turns):
        raise ValueError(
            f"{place}: expected an object with a string under 'prompt' or 'text', a list of "
            "strings under 'turns', or messages of a user under 'messages'"
        )
    if any(half_character(text) is not None for text in (*turns, system or "")):
        raise ValueError(f"{place} holds half a character (a surrogate): write it anew")
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        raise ValueError(f"{place}: expected a string under 'category', got {category!r}")
    return Question(tuple(turns), category, chat, system)


def _asked(messages: object, place: str) -> tuple[str | None, list[str]]:
    """What the system says, and what the user asks, in a conversation of texts."""
    rows = messages if isinstance(messages, list) else []
    said: list[tuple[Any, Any]] = [
        (row.get("role"), row.get("content")) if isinstance(row, dict) else ("", None)
        for row in rows
    ]
    system = said.pop(0)[1] if said and said[0][0] == "system" else None
    known = all(role in ("user", "assistant") for role, _ in said)
    texts = [content for _, content in said] + [system or ""]
    if not known or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{place}: expected texts of a user and an assistant under 'messages', behind one of a "
            "system if there is any"
        )
    return system, [content for role, content in said if role == "user"]


def encode_questions(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """The first turn of each question in tokens, special tokens as the tokenizer adds them. Raises
    ValueError: a prompt without tokens, or one that the target's chat template refuses."""
    prompts: list[Prompt] = []
    for place, question in enumerate(questions):
        prompts.append(_turn(question, tokenizer))
        if not prompts[-1].tokens:
            raise ValueError(f"prompt {place} has no tokens: {question.turns[0]!r}")
    return prompts


def _turn(
    question: Question,
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[list[int]] = (),
    before: Sequence[int] = (),
) -> Prompt:
    """The turn behind these answers, which end the tokens before it."""
    asked = question.turns[len(answers)]
    if question.chat and tokenizer.chat_template:
        tokens = _in_template(question, tokenizer, answers)
    else:  # question, answer, question, with an empty line between them
        begin = "\n\n" if answers else question.system + "\n\n" if question.system else ""
        text = begin + asked + "\n\n" * question.chat
        if before:
            new = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            new = prompt_ids(tokenizer, text)
        tokens = [*before, *new]

    def follow_up(answer: list[int]) -> Prompt:
        return _turn(question, tokenizer, [*answers, answer], [*tokens, *answer])

    more = len(answers) + 1 < len(question.turns)
    return Prompt(tuple(tokens), question.category, follow_up if more else None)


def _in_template(
    question: Question, tokenizer: PreTrainedTokenizerBase, answers: Sequence[list[int]]
) -> list[int]:
    texts = [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
    messages = [] if question.system is None else [{"role": "system", "content": question.system}]
    messages.append({"role": "user", "content": question.turns[0]})
    for answer, asked in zip(texts, question.turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": asked}]
    return ask_ids(tokenizer, messages)


def choose_prompts(
    prompts: Sequence[Prompt], num_prompts: int, longest: int | None = None
) -> tuple[list[Prompt], int]:
    """At most so many prompts, from all categories in turn, each in the file's order; and how many
    had more than `longest` tokens. Raises ValueError: all of them are too long."""
    short = [p for p in prompts if longest is None or len(p.tokens) <= longest]
    if not short:
        raise ValueError(f"all {len(prompts)} prompts have more than {longest} tokens")
    waiting = _by_category(short)
    most = max(map(len, waiting))
    in_turn = [each[place] for place in range(most) for each in waiting if each[place:]]
    return in_turn[:num_prompts], len(prompts) - len(short)


def batches_of(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Prompts in batches, none twice: of one category each, then of what is left over of all of
    them. Fewer than `size` are left out in the end, so that all batches cost alike. Raises
    ValueError: there are fewer than that."""
    check_enough(prompts, size)
    each = _by_category(prompts)
    rest = [prompt for of_one in each for prompt in of_one[len(of_one) // size * size :]]
    return [
        of_one[start : start + size]
        for of_one in (*each, rest)
        for start in range(0, len(of_one) - size + 1, size)
    ]


def check_enough(prompts: Sequence[Prompt], size: int) -> None:
    """Raises ValueError: fewer prompts than a batch has rows. Copies of one go in step with it, and
    would make batches look faster than they are."""
    if len(prompts) < size:
        raise ValueError(
            f"a batch of {size} rows needs as many prompts, got {len(prompts)}: give more prompts, "
            "or smaller batch_sizes"
        )


def _by_category(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    found: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.category, []).append(prompt)
    return list(found.values())
