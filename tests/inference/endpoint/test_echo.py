"""A prompt that is told again before its text, and the log-probabilities of its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from medusa_heads.inference.endpoint import logprobs
from medusa_heads.inference.endpoint.server import Server
from medusa_heads.inference.endpoint.text import Text
from scripts.prove.serving import speaker
from tests.inference.endpoint.asking import ask

PROMPTS = ["abcdefgh", "d", "the same words, again and again<end>and again"]


@pytest.fixture(scope="module")
def speaking() -> Any:
    return speaker()


@pytest.fixture(scope="module")
def server(speaking: Any) -> Iterator[Server]:
    model, tokenizer = speaking
    with Server(model, tokenizer, port=0, max_rows=4) as running:
        yield running


BODY = {"prompt": PROMPTS, "max_tokens": 9, "temperature": 0.8, "seed": 4}


def test_the_prompt_comes_before_the_text(server: Server) -> None:
    """A string to stop at ends the text, and not the prompt."""
    plain = ask(server, "/v1/completions", BODY)[1]
    status, answer = ask(server, "/v1/completions", BODY | {"echo": True, "stop": "ab"})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    for prompt, choice, alone in zip(PROMPTS, answer["choices"], plain["choices"], strict=True):
        assert choice["text"] == prompt.replace("<end>", "") + alone["text"]
        assert choice["logprobs"] is None


@pytest.mark.parametrize("at_once", [2, 64])
def test_tokens_of_the_prompt_are_weighed(
    at_once: int, server: Server, speaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the target's own forward over prompt and text."""
    monkeypatch.setattr(logprobs, "_AT_ONCE", at_once)
    model, tokenizer = speaking
    asked = BODY | {"echo": True, "logprobs": 2}
    status, answer = ask(server, "/v1/completions", asked)
    assert status == 200
    for prompt, choice in zip(PROMPTS, answer["choices"], strict=True):
        told = choice["logprobs"]
        ids = [tokenizer(token)["input_ids"][0] for token in told["tokens"]]
        before = tokenizer(prompt)["input_ids"]
        assert ids[: len(before)] == before and len(before) < len(ids)
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        with torch.no_grad():
            logprobs_TV = model.target.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            right_V = logprobs_TV[place - 1]
            assert abs(told["token_logprobs"][place] - float(right_V[ids[place]])) < 1e-4
            top = sorted(told["top_logprobs"][place].values())[-2:]
            assert torch.allclose(torch.tensor(top), right_V.topk(2).values.flip(0), atol=1e-4)
        for token, start in zip(told["tokens"], told["text_offset"], strict=True):
            assert choice["text"][start:].startswith(token) or token == "<end>"


def test_a_stream_begins_with_the_prompt(server: Server) -> None:
    asked = BODY | {"prompt": "abc", "echo": True, "logprobs": 0}
    whole = ask(server, "/v1/completions", asked)[1]["choices"][0]
    raw = ask(server, "/v1/completions", asked | {"stream": True})[1]
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n")[:-2]]
    pieces = [event["choices"][0] for event in events]
    assert pieces[0]["text"] == "abc" and pieces[0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    told = [each for piece in pieces if piece["logprobs"] for each in piece["logprobs"]["tokens"]]
    assert told == whole["logprobs"]["tokens"]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_character_that_begins_in_the_prompt(logprobs: int | None) -> None:
    """It is told once, when it is whole; no token of a prompt need end with a character."""
    pieces, told = [b"a", b"\xe2\x82", b"\xac"], list[str]()
    text = Text([0, 1], 9, logprobs=logprobs, echo=True, tell=lambda piece, _: told.append(piece))
    text.begin(lambda ids: b"".join(pieces[id] for id in ids).decode(errors="replace"))
    text.tell_prompt(None if logprobs is None else torch.zeros(2, 3))
    for token in (2, 0):
        text.weigh(torch.zeros(3), token)
        text.put(torch.tensor([token]))
        text.end_step()
    text.flush()
    assert "".join(told) == "a\u20aca"
    assert [each.offset for each in text.weighed] == ([] if logprobs is None else [0, 1, 1, 2])


@pytest.mark.parametrize("echo", [False, True])
def test_a_token_begins_behind_a_broken_character(echo: bool) -> None:
    """Which is told with the token that shows that nothing completes it."""
    pieces, ids, told = [b"a", b"\xe2\x82", b"b"], [0, 1, 2, 2], list[str]()
    text = Text(ids if echo else [0], 9, logprobs=1, echo=echo, tell=lambda p, _: told.append(p))
    text.begin(lambda ids: b"".join(pieces[id] for id in ids).decode(errors="replace"))
    if echo:
        text.tell_prompt(torch.zeros(4, 3))
    for token in () if echo else ids:
        text.weigh(torch.zeros(3), token)
        text.put(torch.tensor([token]))
    assert "".join(told) == "a\ufffdbb"
    assert [each.offset for each in text.weighed] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/completions", {"prompt": "a", "echo": 1}, "echo must be true or false"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "echo": True},
            "echo is of completions alone",
        ),
    ],
)
def test_what_is_refused(server: Server, path: str, body: Any, sentence: str) -> None:
    status, answer = ask(server, path, body)
    assert status == 400 and sentence in answer["error"]["message"]
