"""A prompt that the server refuses is that prompt's own fault: the others are answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from medusa_heads.inference.regeneration.answers import REFUSED, Sampling
from medusa_heads.inference.regeneration.dialogues import Dialogues, read_dialogues
from medusa_heads.inference.regeneration.regenerate import Regenerated, answer_dialogues
from medusa_heads.inference.regeneration.server_backend import ServerBackend
from tests.conftest import TinyLlama
from tests.inference.regeneration.completion_server import CompletionServer, serving
from tests.inference.speaking import make_speaker, make_tokenizer
from tests.pairs import with_slow

LONG = "why " * 20


@pytest.fixture
def server(tiny_llama: TinyLlama) -> Iterator[CompletionServer]:
    with serving(make_speaker(tiny_llama, make_tokenizer()), make_tokenizer()) as server:
        server.longest = 40
        yield server


def ask(server: CompletionServer, said: list[str], folder: Path, endpoint: Any) -> Regenerated:
    def talks() -> Dialogues:
        rows = [[{"role": "user", "content": text}] for text in said]
        return read_dialogues(Dataset.from_dict({"messages": rows}), make_tokenizer())

    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {"ends": [tokenizer.eos_token_id], "retries": 0, "concurrency": 1}
    backend = ServerBackend(server.url, "tiny", tokenizer, endpoint=endpoint, **settings)
    return answer_dialogues(backend, talks(), Sampling(4), cache_dir=folder, progress=False)


def test_a_first_prompt_that_is_refused_leads_no_other_to_another_endpoint(
    server: CompletionServer, tmp_path: Path
) -> None:
    result = ask(server, [LONG, "who", "how"], tmp_path, "auto")
    assert not any("messages" in request for request in server.requests)
    assert (result.accounting.done, result.accounting.failed) == (2, {REFUSED: 1})
    assert result.accounting.problems[0]["detail"] == "400: too long"


@pytest.mark.parametrize("endpoint", with_slow(["auto"], ["completions", "chat"]))
def test_many_refusals_in_a_row_are_no_death_of_the_server(
    endpoint: str, server: CompletionServer, tmp_path: Path
) -> None:
    said = [LONG + str(row) for row in range(20)] + ["who"]
    for asked in (21, 20):  # the same command goes on behind them
        server.requests.clear()
        result = ask(server, said, tmp_path, endpoint)
        assert (result.accounting.done, result.accounting.failed) == (1, {REFUSED: 20})
        assert len(server.requests) == asked + 1  # one to try the server with
    assert ask(server, ["who"], tmp_path, endpoint).accounting.reused == 0  # of another row
    server.longest = None  # a refusal is not for ever
    assert ask(server, said, tmp_path, endpoint).accounting.done == 21


def test_many_refusals_behind_an_endpoint_without_token_ids_are_none_either(
    server: CompletionServer, tmp_path: Path
) -> None:
    server.takes_ids = False
    said = [LONG + str(row) for row in range(20)] + ["who"]
    result = ask(server, said, tmp_path, "auto")
    assert (result.accounting.done, result.accounting.failed) == (1, {REFUSED: 20})


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_that_refuses_everything_ends_the_run(
    endpoint: str, server: CompletionServer, tmp_path: Path
) -> None:
    server.longest = 0
    said = [str(row) for row in range(40)]
    with pytest.raises(ValueError, match=r"answers nothing but errors \(400: too long\)"):
        ask(server, said, tmp_path, endpoint)
    assert len(server.requests) in (1 + 16, 1 + 17)  # one may have been on its way
