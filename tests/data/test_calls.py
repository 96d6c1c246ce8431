"""Calls of tools, which corpora hold in two forms and chat templates take in one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from datasets import Dataset

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.messages import messages_of
from medusa_heads.data.sources import as_corpus
from tests.data.corpus_files import contents
from tests.data.test_chat import USER, learnt
from tests.training import templates

CALLS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- call.function.name + ' ' }}WRITTEN{%- endfor %}
{{- '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.mark.parametrize("given", [{"city": "Z\u00fcrich"}, '{"city": "Z\u00fcrich"}'])
@pytest.mark.parametrize(
    "written",
    [
        "{{- call.function.arguments | tojson }}",  # takes objects
        "{{- call.function.arguments }}",  # would write an object as Python does
        "{{- '' + call.function.arguments }}",  # refuses objects
    ],
)
def test_arguments_of_calls_are_written_as_the_model_writes_them(given: Any, written: str) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": given}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    [[said]] = learnt(
        templates.chat_tokenizer(), CALLS.replace("WRITTEN", written), [USER, calling]
    )
    assert said == 'find {"city": "Z\u00fcrich"}<|im_end|>'
    assert call["function"]["arguments"] == given  # type: ignore[index]


@pytest.mark.parametrize("none", [[], "[]", "null", {}, {"id": [], "function": []}, (), None])
def test_an_answer_with_no_calls_keeps_its_text(none: Any) -> None:
    """As exports of chats have it. Templates that ask only whether there are calls wrote none of
    the text."""
    asks = "{%- if m.tool_calls is defined %}{{- 'CALLS' }}{%- else %}{{- m.content }}{%- endif %}"
    template = CALLS.replace("{{- '<|im_start|>' + m.role + '\\n' + m.content }}", "BEGUN" + asks)
    template = template.replace("BEGUN", "{{- '<|im_start|>' + m.role + '\\n' }}")
    answer = {"role": "assistant", "content": "Yo.", "tool_calls": none}
    [[said]] = learnt(templates.chat_tokenizer(), template, messages_of([USER, answer], "messages"))
    assert said == "Yo.<|im_end|>"


def test_calls_may_be_given_as_json() -> None:
    calls = [{"type": "function", "function": {"name": "find", "arguments": {"city": None}}}]
    rows = [
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": given}]}
        for given in (json.dumps(calls), "[]")
    ]
    [read] = contents(as_corpus(Dataset.from_list(rows[:1]), "table"))
    assert read.messages[1]["tool_calls"] == calls
    for given, message in (
        ({"a": 1}, "is of type dict"),
        ("find", "is a text and not a list in JSON"),
    ):
        with pytest.raises(BadRow, match=f"'tool_calls of message 0' {message}"):
            messages_of([{"role": "assistant", "tool_calls": given}], "messages")


def test_a_message_that_says_its_call_itself_needs_no_template_for_it() -> None:
    call = {"function": {"name": "find", "arguments": '{"city": "Bern"}'}}
    for said, arguments in ((True, '{"city": "Bern"}'), (False, "{}")):
        text = f'<call>{{"name": "find", "arguments": {arguments}}}</call>'
        answer = {"role": "assistant", "content": text, "tool_calls": [call]}
        if said:
            [[learnt_text]] = learnt(templates.chat_tokenizer(), templates.CHATML, [USER, answer])
            assert learnt_text == f"{text}<|im_end|>"
        else:
            with pytest.raises(BadRow, match="leaves out the calls of message 1"):
                learnt(templates.chat_tokenizer(), templates.CHATML, [USER, answer])
