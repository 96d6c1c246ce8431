"""Several texts of one request: of several prompts, and several of each."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import Any

import pytest
import torch

from medusa_heads.inference.endpoint.scheduler import Overloaded
from medusa_heads.inference.endpoint.server import Server
from tests.inference.endpoint.asking import ask, metrics, send
from tests.inference.endpoint.conftest import Told, scheduler_of
from tests.pairs import alternately, with_slow

PROMPTS = ["abc", "de", "abc"]


def written(model: Any, tokenizer: Any, prompt: str, seed: int | None, tokens: int = 12) -> str:
    """By the model itself; without a seed the likeliest tokens."""
    ids_1T = torch.tensor([tokenizer(prompt)["input_ids"]])
    if seed is not None:
        torch.manual_seed(seed)
    options = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 1.5}
    text_1T = model.generate(ids_1T, max_new_tokens=tokens, **options)
    text: str = tokenizer.decode(text_1T[0, ids_1T.shape[1] :], skip_special_tokens=True)
    return text


def pieces(raw: str, chat: bool = False) -> tuple[dict[int, str], dict[int, str], Any]:
    """Of a stream: each choice's text and end, and the counts."""
    *events, done = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert done == "[DONE]"
    *told, counts = map(json.loads, events)
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for event in told:
        (choice,) = event["choices"]
        index, ending = choice["index"], choice["finish_reason"]
        piece = choice["delta"].get("content", "") if chat else choice["text"]
        assert index not in ends  # nothing follows the end
        texts[index] = texts.get(index, "") + piece
        if ending:
            ends[index] = ending
    return texts, ends, counts["usage"]


@pytest.mark.parametrize(("max_rows", "ids"), alternately([2, 8], [False, True]))
def test_several_prompts(ids: bool, max_rows: int, endless: Any, tokenizer: Any) -> None:
    expected = [written(endless, tokenizer, prompt, None) for prompt in PROMPTS]
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS] if ids else PROMPTS
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0}
    with Server(endless, tokenizer, port=0, max_rows=max_rows) as server:
        status, answer = ask(server, "/v1/completions", body)
        assert status == 200
        assert [each["text"] for each in answer["choices"]] == expected
        assert [each["index"] for each in answer["choices"]] == [0, 1, 2]
        counts = answer["usage"]
        assert (counts["prompt_tokens"], counts["completion_tokens"]) == (8, 36)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        texts, ends, counts = pieces(ask(server, "/v1/completions", body | options)[1])
        assert texts == dict(enumerate(expected)) and ends == dict.fromkeys(range(3), "length")
        assert (counts["prompt_tokens"], counts["completion_tokens"]) == (8, 36)
        assert 'outcome="finished"} 6\n' in metrics(server)


@pytest.mark.parametrize("chat", with_slow([True], [False]))
def test_choice_i_is_the_text_of_the_seed_plus_i(chat: bool, endless: Any, tokenizer: Any) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompts = ["u:hia:"] if chat else PROMPTS
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    body = body if chat else {"prompt": PROMPTS}
    body |= {"max_tokens": 12, "temperature": 1.5, "n": 3, "seed": 2**63 - 2}
    expected = [
        written(endless, tokenizer, prompt, 2**63 - 2 + choice)
        for prompt in prompts
        for choice in range(3)
    ]
    assert len(set(expected)) == 3 * len(set(prompts))
    with Server(endless, tokenizer, port=0) as server:
        status, answer = ask(server, path, body)
        assert status == 200
        said = [each["message"]["content"] if chat else each["text"] for each in answer["choices"]]
        assert said == expected and answer["usage"]["completion_tokens"] == 12 * len(expected)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        texts, ends, counts = pieces(ask(server, path, body | options)[1], chat)
    assert [texts[index] for index in range(len(expected))] == expected
    assert set(ends.values()) == {"length"} and counts["total_tokens"] == sum(
        [counts["prompt_tokens"], counts["completion_tokens"]]
    )
    assert counts["prompt_tokens"] == sum(len(tokenizer(each)["input_ids"]) for each in prompts)


def test_without_a_seed_all_differ(endless: Any, tokenizer: Any) -> None:
    """Of equal prompts too."""
    body = {"prompt": ["abc", "abc"], "n": 2, "max_tokens": 12, "temperature": 1.5}
    with Server(endless, tokenizer, port=0) as server:
        choices = ask(server, "/v1/completions", body)[1]["choices"]
    assert len({each["text"] for each in choices}) == 4


def test_all_are_taken_or_none(endless: Any, tokenizer: Any) -> None:
    scheduler = scheduler_of(endless, tokenizer, 1, queue=2)
    first, *texts = [Told("abc", tokenizer, 3) for _ in range(4)]
    scheduler.submit(first.text)
    with pytest.raises(Overloaded):
        scheduler.submit(*(told.text for told in texts))
    while not scheduler.is_idle():
        scheduler.turn()
    assert [told.text.tokens for told in (first, *texts)] == [3, 0, 0, 0]
    scheduler.submit(*(told.text for told in texts))
    while not scheduler.is_idle():
        scheduler.turn()
    assert [told.text.tokens for told in texts] == [3, 3, 3]


@pytest.mark.parametrize("stream", with_slow([True], [False]))
def test_who_leaves_frees_all_rows(stream: bool, endless: Any, tokenizer: Any) -> None:
    """Those of the texts that are written, and the places of those that wait."""
    body = {"prompt": PROMPTS, "max_tokens": 400, "temperature": 0, "stream": stream}
    with Server(endless, tokenizer, port=0, max_rows=2, queue=1) as server:
        with closing(send(server, "/v1/completions", body)) as connection:
            if stream:
                assert b"data: " in connection.getresponse().readline()
            while not server.scheduler._running:
                time.sleep(0.01)
        text = metrics(server)
        assert 'outcome="cancelled"} 3\n' in text
        assert "cache_bytes 0\n" in text and "requests_running 0\n" in text
        assert ask(server, "/v1/completions", body | {"max_tokens": 3, "stream": False})[0] == 200


@pytest.mark.parametrize("stream", with_slow([True], [False]))
def test_where_one_fails_none_is_written_further(
    stream: bool, endless: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(endless, tokenizer, port=0, max_rows=2) as server:
        admit, count = server.scheduler._admit, 0

        def fall(text: Any) -> None:
            nonlocal count
            count += 1
            text.options = dict(text.options, num_beams=3) if count == 2 else text.options
            admit(text)

        monkeypatch.setattr(server.scheduler, "_admit", fall)
        body = {"prompt": PROMPTS, "max_tokens": 400, "temperature": 0, "stream": stream}
        status, answer = ask(server, "/v1/completions", body)
        assert status == (200 if stream else 400) and "num_beams" in str(answer)
        text = metrics(server)
    assert 'outcome="cancelled"} 2\n' in text and 'outcome="failed"} 1\n' in text
