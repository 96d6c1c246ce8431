"""Log-probabilities are those of the target's own forward over the whole text, whatever was drafted
and with whomever a text was written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from medusa_heads.inference.endpoint.logprobs import Weights, names_behind, of_chat, of_completion
from medusa_heads.inference.endpoint.server import Server
from medusa_heads.inference.endpoint.text import Text
from scripts.prove.serving import speaker
from tests.inference.endpoint.asking import ask, metrics

PROMPTS = ["abcdefgh", "de", "the same words again and again"]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.2, "top_p": 0.9, "seed": 5},
]


@pytest.fixture(scope="module")
def speaking() -> Any:
    """A model that a draft model knows well, and its tokenizer."""
    return speaker()


@pytest.fixture(scope="module")
def server(speaking: Any) -> Iterator[Server]:
    model, tokenizer = speaking
    with Server(model, tokenizer, port=0, max_rows=4, name="tiny") as running:
        yield running


def expected(speaking: Any, prompt: str, tokens: list[str]) -> Tensor:
    """Of each token of the text the log-probability of all that might stand there, [T, V]."""
    model, tokenizer = speaking
    before = tokenizer(prompt)["input_ids"]
    ids = [tokenizer(token)["input_ids"][0] for token in tokens]
    with torch.no_grad():
        logits_1TV = model.target.model(torch.tensor([before + ids])).logits
    return logits_1TV[0, len(before) - 1 : -1].log_softmax(-1)


def furthest(speaking: Any, prompt: str, told: dict[str, Any]) -> float:
    """How far what was told of a completion is from that."""
    tokenizer = speaking[1]
    logprobs_TV = expected(speaking, prompt, told["tokens"])
    off = 0.0
    for place, token in enumerate(told["tokens"]):
        right = {tokenizer.decode([id]): p for id, p in enumerate(logprobs_TV[place].tolist())}
        top = told["top_logprobs"][place]
        assert top[token] == told["token_logprobs"][place]
        off = max([off, *(abs(top[each] - right[each]) for each in top)])
        highest = sorted(right.values())[-3:]
        off = max(
            off, *(abs(a - b) for a, b in zip(sorted(top.values())[-3:], highest, strict=True))
        )
    return off


def asked(server: Server, **body: Any) -> list[Any]:
    usual = {"prompt": PROMPTS, "max_tokens": 30, "logprobs": 3}
    status, answer = ask(server, "/v1/completions", usual | body)
    assert status == 200
    choices = answer["choices"]
    told = [len(each["logprobs"]["tokens"]) for each in choices]
    assert sum(told) == answer["usage"]["completion_tokens"]
    return list(choices)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(each, marks=[pytest.mark.slow] * (n % 2)) for n, each in enumerate(SETTINGS)],
    ids=str,
)
def test_of_rows_with_drafts(settings: dict[str, Any], server: Server, speaking: Any) -> None:
    for place, choice in enumerate(asked(server, n=2, **settings)):
        assert furthest(speaking, PROMPTS[place // 2], choice["logprobs"]) < 1e-4
        told = choice["logprobs"]
        for token, start in zip(told["tokens"], told["text_offset"], strict=True):
            assert choice["text"][start:].startswith(token) or token == "<end>"
        # And the text is the one that nobody weighs.
        body = {"prompt": PROMPTS[place // 2], "max_tokens": 30, **settings}
        body |= {"seed": settings.get("seed", 0) + place % 2}
        assert ask(server, "/v1/completions", body)[1]["choices"][0]["text"] == choice["text"]
    assert float(metrics(server).partition("\nmedusa_heads_tokens_per_step ")[2].split()[0]) > 1.3


def test_logits_of_another_node_would_be_noticed(
    server: Server, speaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the root, for all tokens that a step commits."""
    weigh, end_step, seen = Text.weigh, Text.end_step, dict[Text, Tensor]()

    def weigh_first(text: Text, logits_V: Tensor, token: int) -> None:
        weigh(text, seen.setdefault(text, logits_V), token)

    def end(text: Text) -> None:
        seen.pop(text, None)
        end_step(text)

    monkeypatch.setattr(Text, "weigh", weigh_first)
    monkeypatch.setattr(Text, "end_step", end)
    choices = asked(server, temperature=0.7, seed=5)
    assert max(
        furthest(speaking, prompt, choice["logprobs"])
        for prompt, choice in zip(PROMPTS, choices, strict=True)
    ) > 0.1  # fmt: skip


def test_of_a_text_that_begins_as_an_earlier_one(server: Server, speaking: Any) -> None:
    prompt = "all of it was said before, word by word"
    for more in ("", " but for this"):
        body = {"prompt": prompt + more, "max_tokens": 30, "logprobs": 3, "temperature": 0}
        answer = ask(server, "/v1/completions", body)[1]
        begun = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (begun > 16) == bool(more)
        assert furthest(speaking, prompt + more, answer["choices"][0]["logprobs"]) < 1e-4


def test_of_a_text_that_a_string_ends(server: Server, speaking: Any) -> None:
    """Each token that `usage` counts is there, those of the string too."""
    whole = max(asked(server, temperature=0.7, seed=5), key=lambda each: len(each["text"]))
    prompt = PROMPTS[whole["index"]]
    stop = whole["text"][9:12]
    place = whole["text"].index(stop)
    (cut,) = asked(server, prompt=prompt, temperature=0.7, seed=5, stop=stop)
    assert cut["text"] == whole["text"][:place] and cut["finish_reason"] == "stop"
    for name, values in cut["logprobs"].items():
        assert len(values) == place + len(stop)
        if name in ("tokens", "text_offset"):
            assert values == whole["logprobs"][name][: place + len(stop)]
    assert furthest(speaking, prompt, cut["logprobs"]) < 1e-4


def test_of_a_stream_and_of_a_conversation(server: Server, speaking: Any) -> None:
    turn = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "n": 2, "seed": 3}
    body = turn | {"temperature": 0.9, "logprobs": True, "top_logprobs": 2}
    whole = ask(server, "/v1/chat/completions", body)[1]["choices"]
    raw = ask(server, "/v1/chat/completions", body | {"stream": True})[1]
    pieces: list[list[Any]] = [[], []]
    for line in raw.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        told = choice["logprobs"]
        pieces[choice["index"]] += told["content"] if told else []
        if said := choice["delta"].get("content"):  # each piece comes with its own tokens
            assert said == "".join(each["token"] for each in told["content"]).replace("<end>", "")
    for choice, streamed in zip(whole, pieces, strict=True):
        content = choice["logprobs"]["content"]
        assert streamed == content and choice["logprobs"]["refusal"] is None
        logprobs_TV = expected(speaking, "u:hia:", [each["token"] for each in content])
        for each, logprobs_V in zip(content, logprobs_TV, strict=True):
            assert each["bytes"] == list(each["token"].encode())
            id = speaking[1](each["token"])["input_ids"][0]
            assert abs(each["logprob"] - float(logprobs_V[id])) < 1e-4
            top = [other["logprob"] for other in each["top_logprobs"]]
            assert torch.allclose(torch.tensor(top), logprobs_V.topk(2).values, atol=1e-4)


def test_nothing_is_weighed_that_nobody_asks_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Text, "weigh", None)
    for body in ({"prompt": "abc"}, {"prompt": "abc", "logprobs": False}):
        status, answer = ask(server, "/v1/completions", body)
        assert status == 200 and answer["choices"][0]["logprobs"] is None


def test_what_json_cannot_say() -> None:
    logits_V = torch.tensor([0.0, -math.inf, 0.0])
    (weights,) = Weights.of(logits_V[None], [1], 20)
    assert weights.logprob == -9999.0 and len(weights.top) == 3
    assert Weights.of(torch.full((1, 3), math.nan), [1], 1)[0].top[0][1] == -9999.0


def test_a_likeliest_token_that_the_tokenizer_does_not_have() -> None:
    """Only a padded vocabulary has it; some tokenizers raise on such ids."""

    def decode(ids: list[int]) -> str:
        return "".join("ab"[id] for id in ids)

    told = list[str]()
    text = Text([0], 9, logprobs=3, echo=True, tell=lambda piece, _: told.append(piece))
    text.begin(decode)
    text.tell_prompt(torch.zeros(1, 3))
    text.weigh(torch.tensor([0.0, 1.0, 2.0]), 1)
    text.put(torch.tensor([1]))
    assert "".join(told) == "ab"
    assert [each for each, _ in text.weighed[1].top] == ["", "b", "a"]


def test_the_names_of_tokens() -> None:
    """A part of a character has none, and no bytes; one behind a space keeps it."""
    pieces = {1: b"\xe2\x82", 2: b"\xac", 3: b" a", 4: b"a"}

    def decode(ids: list[int]) -> str:
        return b"".join(pieces[id] for id in ids).decode(errors="replace").removeprefix(" ")

    assert names_behind(decode, [4])(3) == " a" and decode([3]) == "a"
    assert names_behind(decode, [4])(1) == "\ufffd" == names_behind(decode, [1])(2)
    decoded = Mock(side_effect=decode)
    assert [*map(names_behind(decoded, [4]), (3, 4, 3))] == [" a", "a", " a"]
    assert decoded.call_count == 3  # nothing is decoded twice
    weights = Weights(-1.0, [(3, -0.5), (4, -1.0), (1, -2.0), (2, -3.0)])
    weighed = weights.named(names_behind(decode, [4]), 4, 7, "a")
    # Of tokens with the same text the likelier one.
    assert of_completion([weighed]) == {
        "tokens": ["a"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{" a": -0.5, "a": -1.0, "\ufffd": -2.0}],
        "text_offset": [7],
    }
    (entry,) = of_chat([weighed])["content"]
    assert entry["bytes"] == [97] and entry["top_logprobs"][2]["bytes"] is None
