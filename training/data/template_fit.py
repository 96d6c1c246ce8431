"""Whether rows stand in the form in which the target is asked, and end as its answers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from medusa_heads.config import IGNORED
from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.chat import ChatTemplate
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data.columns import stretches

_ROWS = 256
_ANSWERS = 8  # that are judged at least
_BEFORE = 256  # tokens of the prompt that are looked at
_MARK = 5  # characters of what stands before an answer: fewer may stand in any text
_ASKED = "How are you?"
_DO = (
    "give conversations in 'messages' without another chat_template, or let the target answer "
    "(medusa-heads regenerate)"
)


def template_mismatch(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: DataArguments,
    stop_ids: Collection[int],
    name: str,
) -> str | None:
    """The sentence for rows (`input_ids`, `labels`) most of whose answers do not stand behind what
    the tokenizer's own chat template writes before one, or end with a token that is not among those
    that end the target's text; or most of which are conversations and learnt whole. None where
    nothing can be said: no template, few answers, or other text that is learnt whole."""
    some = rows.select(range(min(len(rows), _ROWS)))
    asked, ends, whole = [], [], []
    for row in some:
        ids = row["input_ids"]
        learnt = stretches(np.asarray(row["labels"]) != IGNORED).tolist()
        if learnt == [[0, len(ids)]]:
            whole.append(ids)
        answers = [(start, stop) for start, stop in learnt if start]
        for start, _ in answers[:1]:  # later ones may follow a tool
            asked.append(ids[max(start - _BEFORE, 0) : start])
        for _, stop in answers:
            if stop < len(ids) or len(ids) < settings.max_length:  # not cut
                ends.append(ids[stop - 1])
    written = None if tokenizer is None else _before_answers(tokenizer, settings.template_kwargs())
    if written and len(asked) >= _ANSWERS and tokenizer is not None:
        prompts = tokenizer.batch_decode(asked)
        found = sum(written in prompt for prompt in prompts)
        if 2 * found < len(asked):
            return (
                f"the template of the {name} is not the target's: {found} of {len(asked)} answers "
                f"stand behind {written!r}, which the target is asked with; {_DO}"
            )
    if written and len(written) >= _MARK and len(whole) >= _ANSWERS and tokenizer is not None:
        found = sum(written in text for text in tokenizer.batch_decode(whole))
        if 2 * found >= len(whole):
            return (
                f"{found} of {len(whole)} texts of the {name} are conversations that a chat "
                f"template has rendered ({written!r}), and all their tokens are learnt, those of "
                "users too: give them in 'messages', of which the answers alone are learnt"
            )
    if stop_ids and len(ends) >= _ANSWERS:
        (token, count), ended = Counter(ends).most_common(1)[0], sum(e in stop_ids for e in ends)
        # Answers that were cut at some length end with whatever stood there.
        if 2 * ended < len(ends) and 2 * count >= len(ends) and token not in stop_ids:
            shown, stops = (_shown(tokenizer, [*each]) for each in ([token], stop_ids))
            return (
                f"the template of the {name} is not the target's: {ended} of {len(ends)} answers "
                f"end with a token that ends its text ({stops}), most with {shown}; {_DO}"
            )
    return None


def _before_answers(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> str | None:
    """What stands between a question and its answer, without white space around it."""
    if not tokenizer.chat_template:
        return None
    try:
        question = [{"role": "user", "content": _ASKED}]
        text = ChatTemplate(tokenizer, arguments=arguments).render(question, None, ask=True)
    except BadRow:
        return None
    # As it is decoded: a tokenizer may write white space otherwise.
    decoded = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
    return str(decoded).rpartition(_ASKED)[2].strip() or None


def _shown(tokenizer: PreTrainedTokenizerBase | None, tokens: list[int]) -> str:
    if tokenizer is None:
        return " or ".join(f"token {token}" for token in tokens)
    return " or ".join(repr(str(tokenizer.decode([token]))) for token in tokens)
