"""A server's answers are judged as those of the backends at home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from medusa_heads.inference.regeneration.answers import (
    BROKEN_TEXT,
    EMPTY,
    OVERLONG,
    Answer,
    Sampling,
)
from medusa_heads.inference.regeneration.dialogues import read_dialogues
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.regenerate import answer_dialogues
from medusa_heads.inference.regeneration.server_backend import ServerBackend
from medusa_heads.inference.regeneration.transformers_backend import TransformersBackend
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.inference.regeneration.completion_server import serving
from tests.inference.speaking import make_tokenizer
from tests.training.templates import DEMO_TARGET

TOKENIZER = make_tokenizer()
END: Any = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER(text)["input_ids"]
    return encoded


def read(
    choice: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: Any
) -> Answer:
    """What is made of the only answer of a server."""
    backend = ServerBackend("http://host/v1", "tiny", TOKENIZER, ends=[END], **limits)
    monkeypatch.setattr(backend, "_post", lambda *_: (200, {"choices": [choice]}))
    made: list[Answer] = []
    read_one = backend._read

    def noted(*given: Any) -> Answer:
        made.append(read_one(*given))
        return made[-1]

    monkeypatch.setattr(backend, "_read", noted)
    dialogues = read_dialogues(Dataset.from_dict({"input_ids": [ids("how?")]}), None)
    try:
        answer_dialogues(backend, dialogues, Sampling(3), cache_dir=folder, progress=False)
    except ValueError as error:
        assert "not one answer" in str(error)
    (answer,) = made
    return answer


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"text": "", "token_ids": [END]}, Answer(failure=EMPTY)),
        ({"text": "", "token_ids": [END, *ids("ab")]}, Answer(failure=EMPTY)),
        ({"text": "ab", "token_ids": [*ids("a"), END, *ids("bcd")]}, Answer([*ids("a"), END])),
        ({"text": "abc", "token_ids": [*ids("abc"), END]}, Answer([*ids("abc"), END])),
        ({"text": "abc"}, Answer([*ids("abc"), END])),
        ({"text": "ab<end>"}, Answer([*ids("ab"), END])),
        ({"text": "<end>"}, Answer(failure=EMPTY)),
    ],
)
def test_answers_go_up_to_their_first_end(
    choice: dict[str, Any], expected: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read({"finish_reason": "stop"} | choice, tmp_path, monkeypatch) == expected


def test_an_end_that_is_spelt_within_a_text_is_no_text_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = read({"finish_reason": "stop", "text": "a<end>b"}, tmp_path, monkeypatch)
    assert (answer.failure, answer.detail) == (BROKEN_TEXT, "a<end>b")


def test_a_broken_character_is_not_what_the_target_wrote() -> None:
    demo: Any = AutoTokenizer.from_pretrained(DEMO_TARGET)
    backend = ServerBackend("http://host/v1", "demo", demo, ends=[0], endpoint="completions")
    prompt = Prompt(demo("x = ")["input_ids"], greedy=True)
    written = demo("\u65e5\u672c")["input_ids"]
    text = demo.decode(written[:-1])
    assert text == "\u65e5\ufffd"
    for reason, said in (("length", text), ("stop", text), ("length", text + "x")):
        choice = {"text": said, "finish_reason": reason}
        answer = backend._read(prompt, {"choices": [choice]}, Sampling(9))
        if (reason, said) == ("length", text):  # it was cut there
            assert list(answer.tokens) == written[: len(answer.tokens)] and answer.tokens
        else:
            assert (answer.failure, answer.detail) == (BROKEN_TEXT, said)


@pytest.mark.parametrize("sent", [{"text": "abcde"}, {"text": "x", "token_ids": ids("abcde")}])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_answers_longer_than_asked_for_are_failures(
    sent: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = read({"finish_reason": reason} | sent, tmp_path, monkeypatch)
    assert answer.failure == OVERLONG and "3 were asked for" in answer.detail


def test_an_answer_that_ends_behind_the_context_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = {"finish_reason": "stop", "text": "abc"}
    longest = len(ids("how?abc"))
    answer = read(choice, tmp_path / "within", monkeypatch, max_positions=longest + 1)
    assert answer.failure is None
    answer = read(choice, tmp_path / "behind", monkeypatch, max_positions=longest)
    assert answer.failure == OVERLONG and f"the context is {longest}" in answer.detail


@pytest.mark.parametrize("unknown", [None, "skip_special_tokens"])
def test_special_tokens_within_an_answer_are_asked_for(
    unknown: str | None, tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    """Servers leave them out, and the text without them is not what the target wrote. One that
    does not know the request is asked as before."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<channel>"]})
    model = tiny_llama(vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.sequence_bias = [[[len(tokenizer) - 1], 3.0]]
    rows = Dataset.from_dict({"input_ids": [ids(word) for word in ("how?", "why?", "who", "so")]})
    made = {}
    with serving(model, tokenizer) as server:
        server.unknown = unknown
        there = ServerBackend(server.url, "tiny", tokenizer, ends=[END], retries=0, concurrency=1)
        for name, backend in (("there", there), ("home", TransformersBackend(TargetModel(model)))):
            result = answer_dialogues(
                backend, read_dialogues(rows, None), Sampling(12),
                greedy_share=1.0, cache_dir=tmp_path / name, progress=False,
            )  # fmt: skip
            made[name] = result.rows.to_dict()
    assert any(len(tokenizer) - 1 in row for row in made["home"]["labels"])
    assert (made["there"] == made["home"]) == (unknown is None)
    asked = ["skip_special_tokens" in request for request in server.requests]
    assert asked == ([True] * 5 if unknown is None else [True] + [False] * 5)
