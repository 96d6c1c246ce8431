"""Calls of tools, which corpora hold in two forms and chat templates take in one."""

from __future__ import annotations

from typing import Any

import pytest

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
