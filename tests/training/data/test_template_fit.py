"""Rows in a template that is not the target's."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from medusa_heads.config import IGNORED
from medusa_heads.data.chat import ChatTemplate
from medusa_heads.data.formats import Conversation
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data.template_fit import template_mismatch
from tests.training import templates
from tests.training.templates import chat_tokenizer

TEMPLATES = {
    "chatml": templates.CHATML,
    "llama3": templates.LLAMA3,
    "mistral": templates.MISTRAL,
    "gemma": templates.GEMMA,
    "thinking": templates.THINKING,
    "leading newline": templates.LEADING_NEWLINE,
    "closed": templates.CLOSED,
    "plain": templates.PLAIN,
    "trailing space": templates.TRAILING_SPACE,
}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}


def rows_of(template: str, tokenizer: Any, turns: int = 2) -> Dataset:
    chat = ChatTemplate(tokenizer, TEMPLATES[template])
    rows = []
    for i in range(10):
        said = [
            {"role": role, "content": f"{role} says {i + turn}"}
            for turn in range(turns)
            for role in ("user", "assistant")
        ]
        for ids, labels in templates.rows_of(chat, Conversation(said)):
            rows.append({"input_ids": ids, "labels": labels})
    return Dataset.from_list(rows)


def found(rows: Dataset, tokenizer: Any, own: str | None, ends: list[str]) -> str | None:
    tokenizer.chat_template = TEMPLATES[own] if own else None
    stops = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    return template_mismatch(rows, tokenizer, DataArguments(), stops, "training set")


@pytest.mark.parametrize("written", list(TEMPLATES))
def test_rows_of_the_targets_own_template_are_not(written: str) -> None:
    tokenizer = chat_tokenizer()
    ends = [ENDS[written]] if written in ENDS else []
    assert found(rows_of(written, tokenizer), tokenizer, written, ends) is None


@pytest.mark.parametrize("written", list(ENDS))
@pytest.mark.parametrize("own", list(ENDS))
def test_rows_of_another_template_are_named(written: str, own: str) -> None:
    tokenizer = chat_tokenizer()
    sentence = found(rows_of(written, tokenizer), tokenizer, own, [ENDS[own]])
    if written != own:
        assert sentence is not None
        assert "the template of the training set is not the target's: 0 of 10 answers" in sentence
        assert "which the target is asked with; give conversations in 'messages'" in sentence


def test_answers_that_end_otherwise_are_named() -> None:
    tokenizer = chat_tokenizer()
    rows = rows_of("chatml", tokenizer)
    assert found(rows, tokenizer, None, ["<|im_end|>", "</s>"]) is None
    assert found(rows, tokenizer, None, []) is None  # it is not known what ends its text
    sentence = found(rows, tokenizer, None, ["</s>"])
    assert sentence is not None and "0 of 20 answers end with a token that ends" in sentence
    assert "its text ('</s>'), most with '<|im_end|>'" in sentence
    rows = rows_of("chatml", tokenizer, turns=1)
    cut = [{name: tokens[:-1] for name, tokens in row.items()} for row in rows]  # to numbers
    assert found(Dataset.from_list(cut), tokenizer, None, ["</s>"]) is None


def test_nothing_is_said_of_other_text_that_is_learnt_whole_or_of_few_answers() -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer("def main():\n    return 1\n")["input_ids"]
    whole = Dataset.from_list([{"input_ids": ids, "labels": ids}] * 20)
    assert found(whole, tokenizer, "chatml", ["<|im_end|>"]) is None
    ids_of = rows_of("chatml", tokenizer)["input_ids"]
    rendered = [{"input_ids": ids, "labels": ids} for ids in ids_of]
    sentence = found(Dataset.from_list(rendered), tokenizer, "chatml", ["<|im_end|>"])
    assert sentence is not None and "10 of 10 texts of the training set are conver" in sentence
    few = rows_of("llama3", tokenizer).select(range(3))
    assert found(few, tokenizer, "chatml", ["<|im_end|>"]) is None
    answers = [{"input_ids": ids, "labels": [IGNORED] * 3 + ids[3:]}] * 20
    assert found(Dataset.from_list(answers), tokenizer, "chatml", []) is not None
