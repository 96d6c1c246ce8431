"""Pieces of a text are the text, and it ends where it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_heads.inference.endpoint.server import Server
from medusa_heads.inference.endpoint.text import Text
from tests.inference.endpoint.asking import ask

STEPS = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=4), max_size=12)


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def write(
    text: Text, steps: list[list[int]], decode: Callable[[list[int]], str] = decode
) -> tuple[list[str], str | None]:
    """What is told of a text whose tokens are bytes."""
    told: list[tuple[str, str | None]] = []
    text.tell = lambda piece, ending: told.append((piece, ending))
    text.begin(decode)
    for step in steps:
        for token in step:
            text.put(torch.tensor([token]))
        text.end_step()
        if text.stopped:
            break
    text.flush()
    text.end("length")
    return [piece for piece, ending in told if ending is None], told[-1][1]


@settings(deadline=None)
@given(STEPS)
def test_pieces_are_the_text(steps: list[list[int]]) -> None:
    pieces, ending = write(Text([], 99), steps)
    assert "".join(pieces) == decode([token for step in steps for token in step])
    assert ending == "length" and all(pieces)


def test_no_piece_holds_half_of_a_character() -> None:
    euro = list("a\N{EURO SIGN}b".encode())
    assert write(Text([], 9), [[byte] for byte in euro])[0] == ["a", "\N{EURO SIGN}", "b"]
    assert write(Text([], 9), [[byte] for byte in euro[:3]])[0] == [
        "a",
        "\N{REPLACEMENT CHARACTER}",
    ]


@pytest.mark.parametrize(
    ("said", "stop", "pieces", "tokens"),
    [
        (["ab", "cd", "ef"], ["cd"], ["ab"], 4),
        (["abc", "de", "f"], ["cd"], ["ab"], 4),  # held until it is known
        (["abc", "ef"], ["cd"], ["ab", "cef"], 5),
        (["aaab"], ["aab"], ["a"], 4),
        (["abcd"], ["cd", "b"], ["a"], 2),
        (["abc"], ["cd"], ["ab", "c"], 3),
    ],
)
def test_strings_to_stop_at(
    said: list[str], stop: list[str], pieces: list[str], tokens: int
) -> None:
    text = Text([], 9, stop=stop)
    told, ending = write(text, [list(step.encode()) for step in said])
    whole = "".join(said)
    assert "".join(told) == "".join(pieces) and text.tokens == tokens
    assert ending == ("stop" if any(each in whole for each in stop) else "length")


@settings(deadline=None)
@given(STEPS, st.integers(1, 3))
def test_where_a_text_stops_does_not_depend_on_its_steps(steps: list[list[int]], n: int) -> None:
    tokens = [65 + token % 3 for step in steps for token in step]
    one_by_one, whole = Text([], 99, stop=["A" * n + "B"]), Text([], 99, stop=["A" * n + "B"])
    first, _ = write(one_by_one, [[token] for token in tokens])
    second, _ = write(whole, [tokens])
    assert "".join(first) == "".join(second) and one_by_one.tokens == whole.tokens
    assert "".join(first) == decode(tokens).partition("A" * n + "B")[0]


@pytest.mark.parametrize("stop", [[], ["cx"]])
def test_a_token_to_stop_at(stop: list[str]) -> None:
    """Of which no text is made, as a tokenizer makes none of special ones. What may have been the
    beginning of a string to stop at is told, and so is half of a character."""

    def decode_bytes(ids: list[int]) -> str:
        return decode([id for id in ids if id < 256])

    text = Text([], 9, stop=stop, stop_ids={256})
    told, ending = write(text, [[97, 98], [99, 256, 100]], decode_bytes)
    assert "".join(told) == "abc" and ending == "stop" and text.tokens == 4
    half = Text([], 9, stop=stop, stop_ids={256})
    told, ending = write(half, [[97, 0xE2], [256]], decode_bytes)
    assert "".join(told) == "a\N{REPLACEMENT CHARACTER}" and ending == "stop"


@pytest.mark.parametrize(("stop", "written"), [([], "\u0a93\u0a96."), (["\u0a96"], "\u0a93")])
def test_a_prompt_that_ends_in_bytes_is_continued(stop: list[str], written: str) -> None:
    """As Llama 2's tokenizer decodes: half a character breaks all bytes beside it."""

    def decode_as_one(ids: list[int]) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(ids)

    text = Text(list(("\u0a97" * 9).encode()), 9, stop=stop)
    told, _ = write(text, [[byte] for byte in "\u0a93\u0a96.".encode()], decode_as_one)
    assert "".join(told) == written


def test_one_that_never_began_can_end() -> None:
    told: list[str | None] = []
    Text([1], 9, tell=lambda _, ending: told.append(ending)).end("cancelled")
    assert told == ["cancelled"]


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"stop": "zz"}])
def test_the_end_token_is_no_text_where_the_tokenizer_takes_it_for_a_word(
    more: dict[str, Any], endless: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tokenizers of fine-tuned models take `<|im_end|>`."""
    ids_1T = tokenizer("abc", return_tensors="pt", return_token_type_ids=False)
    text_1T = endless.generate(**ids_1T, max_new_tokens=20, do_sample=False)
    end = text_1T[0, -1].item()
    before = text_1T[0, 3:].tolist()
    before = before[: before.index(end)]
    monkeypatch.setattr(endless.target.model.generation_config, "eos_token_id", end)
    with Server(endless, tokenizer, port=0) as server:
        body = {"prompt": "abc", "max_tokens": 30, "temperature": 0, **more}
        _, answer = ask(server, "/v1/completions", body)
        said = ask(server, "/v1/completions", body | {"stream": True})[1]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode(before), "stop")
    pieces = [json.loads(line)["choices"][0] for line in said.split("data: ")[1:-1]]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert answer["usage"]["completion_tokens"] == len(before) + 1
    if "logprobs" in more:
        assert choice["logprobs"]["tokens"][-1] == tokenizer.decode([end])
