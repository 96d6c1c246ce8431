"""Later turns are asked behind what the target said, or not at all."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from datasets import Dataset

from medusa_heads.inference.regeneration.answers import SPECIAL_INSIDE
from medusa_heads.inference.regeneration.dialogues import (
    ChatDialogue,
    Unanswerable,
    read_dialogues,
)
from tests.inference.speaking import END, make_tokenizer

MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>{{ m.role }}"
    "{% endif %}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PARSER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": END},
    },
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "and?"},
]


def channels(parser: Any = None) -> tuple[Any, ChatDialogue]:
    """A tokenizer whose answers hold special tokens inside, and a conversation with it."""
    tokenizer = make_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.response_template = parser
    (dialogue,) = read_dialogues(Dataset.from_dict({"messages": [TALK]}), tokenizer)
    assert isinstance(dialogue, ChatDialogue) and dialogue.turns == 3
    return tokenizer, dialogue


def say(tokenizer: Any, dialogue: ChatDialogue, turn: int, text: str) -> str:
    """What a turn asks, which is then answered."""
    asked = str(tokenizer.decode(list(dialogue.ask(turn)[0])))
    dialogue.take(tokenizer(text)["input_ids"])
    return asked


def test_the_end_alone_is_taken_off_what_was_said() -> None:
    tokenizer, dialogue = channels()
    say(tokenizer, dialogue, 0, f"so <think>a</think> b{END}")
    said = "<|start|>assistant<|channel|>final<|message|>so <think>a</think> b<|end|>"
    assert said in say(tokenizer, dialogue, 1, "cut off")
    assert "<|message|>cut off<|end|>" in say(tokenizer, dialogue, 2, "so")


def test_nothing_is_asked_behind_an_answer_that_is_no_message() -> None:
    tokenizer, dialogue = channels()
    say(tokenizer, dialogue, 0, f"{THOUGHT}Hello{END}")
    with pytest.raises(Unanswerable, match=r"such as '<\|channel\|>'.* response_template") as told:
        dialogue.ask(1)
    assert told.value.reason == SPECIAL_INSIDE
    (row,) = dialogue.rows()  # the answer itself is learnt
    assert tokenizer.decode([t for t in row["labels"] if t >= 0]) == f"{THOUGHT}Hello{END}"


def test_the_tokenizers_own_parser_reads_an_answer_as_a_message() -> None:
    tokenizer, dialogue = channels(PARSER)
    say(tokenizer, dialogue, 0, f"{THOUGHT}Hello{END}")
    assert f"<|start|>assistant{THOUGHT}Hello<|end|>" in say(tokenizer, dialogue, 1, "so")


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_the_parser_is_told_the_tools_whose_arguments_it_reads(tools: Any) -> None:
    tokenizer, _ = channels(PARSER)
    rows = Dataset.from_dict({"messages": [TALK], "tools": [tools]})
    (dialogue,) = read_dialogues(rows, tokenizer)
    assert isinstance(dialogue, ChatDialogue)
    with mock.patch.object(tokenizer, "parse_response", wraps=tokenizer.parse_response) as parse:
        say(tokenizer, dialogue, 0, THOUGHT + "Yes" + END)
    assert parse.call_args.kwargs["tools"] == TOOLS


@pytest.mark.parametrize("parser", [{"fields": 7}, {"start_anchor": "a"}])
def test_a_parser_that_cannot_read_an_answer_is_named(parser: Any) -> None:
    tokenizer, dialogue = channels(parser)
    say(tokenizer, dialogue, 0, f"{THOUGHT}Hello{END}")
    with pytest.raises(Unanswerable, match="cannot read it") as told:
        dialogue.ask(1)
    assert told.value.reason == SPECIAL_INSIDE
