"""What a server that renders conversations itself is told: all that the row's own rendering has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from medusa_heads.inference.regeneration.answers import CUT_CALLS, Sampling
from medusa_heads.inference.regeneration.dialogues import read_dialogues
from medusa_heads.inference.regeneration.regenerate import answer_dialogues
from medusa_heads.inference.regeneration.server_backend import ServerBackend
from tests.conftest import TinyLlama
from tests.inference.regeneration.completion_server import CompletionServer, serving
from tests.inference.speaking import TEMPLATE, make_speaker, make_tokenizer

# Renders the tools' names, and a word that is given.
TOLD = "{{ word }}{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}" + TEMPLATE
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
TALK = [{"role": "user", "content": "how?"}]


@pytest.fixture
def server(tiny_llama: TinyLlama) -> Iterator[CompletionServer]:
    with serving(make_speaker(tiny_llama, make_tokenizer()), make_tokenizer(TOLD)) as server:
        yield server


def asked(server: CompletionServer) -> ServerBackend:
    tokenizer = make_tokenizer(TOLD)
    ends = [tokenizer.eos_token_id]
    return ServerBackend(server.url, "tiny", tokenizer, ends=ends, retries=0, endpoint="chat")


@pytest.mark.parametrize("spelt", [False, True])
def test_tools_and_template_variables_are_sent(
    spelt: bool, server: CompletionServer, tmp_path: Path
) -> None:
    tools: Any = json.dumps(TOOLS) if spelt else TOOLS
    corpus = Dataset.from_dict({"messages": [json.dumps(TALK)] * 2, "tools": [tools, None]})
    tokenizer = make_tokenizer(TOLD)
    dialogues = read_dialogues(corpus, tokenizer, template_options={"word": "so "})
    result = answer_dialogues(
        asked(server), dialogues, Sampling(8), cache_dir=tmp_path, progress=False
    )
    assert result.accounting.done == 2 and not result.accounting.remarks  # the same prompt
    assert {json.dumps(each["chat_template_kwargs"]) for each in server.requests} == {
        '{"word": "so "}'
    }
    named = [each["tools"][0]["function"]["name"] for each in server.requests if "tools" in each]
    assert named == ["look"]


def test_arguments_of_calls_are_sent_as_texts(server: CompletionServer, tmp_path: Path) -> None:
    """As OpenAI's protocol has them, whatever the corpus has."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    talk = [*TALK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = Dataset.from_dict({"messages": [[*talk, {"role": "tool", "content": "y"}]]})
    dialogues = read_dialogues(rows, make_tokenizer(TOLD), turns="last")
    answer_dialogues(asked(server), dialogues, Sampling(8), cache_dir=tmp_path, progress=False)
    (sent,) = server.requests[-1]["messages"][1]["tool_calls"]
    assert sent["function"] == {"name": "look", "arguments": '{"at": "x"}'}


def test_an_answer_whose_tool_calls_the_server_cuts_out_is_none(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = {"content": "a", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    backend = asked(server)
    monkeypatch.setattr(backend, "_post", lambda *_: (200, {"choices": [{"message": message}]}))
    dialogues = read_dialogues(Dataset.from_dict({"messages": [TALK]}), make_tokenizer(TOLD))
    with pytest.raises(ValueError, match=CUT_CALLS):
        answer_dialogues(backend, dialogues, Sampling(8), cache_dir=tmp_path, progress=False)
