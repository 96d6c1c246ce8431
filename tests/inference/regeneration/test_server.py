"""Answers from behind a server, over real HTTP: the same text as at home, and every way to fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from datasets import Dataset

from medusa_heads.inference.regeneration.answers import (
    BROKEN_TEXT,
    EMPTY,
    OTHER_PROMPT,
    REFUSED,
    SERVER_ERROR,
    Sampling,
)
from medusa_heads.inference.regeneration.dialogues import Dialogues, read_dialogues
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.regenerate import Regenerated, answer_dialogues
from medusa_heads.inference.regeneration.server_backend import ServerBackend
from medusa_heads.inference.regeneration.transformers_backend import TransformersBackend
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.inference.regeneration.completion_server import CompletionServer, serving
from tests.inference.speaking import make_speaker, make_tokenizer

SAMPLING = Sampling(max_new_tokens=8)
TALKS = [
    [{"role": "user", "content": f"{word}?"}, {"role": "assistant", "content": "?"}]
    for word in ("how", "why", "where", "what now", "who", "when", "which", "whose")
]


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    return make_speaker(tiny_llama, make_tokenizer())


@pytest.fixture
def server(model: Any) -> Iterator[CompletionServer]:
    with serving(model, make_tokenizer()) as server:
        yield server


def dialogues(turns: Any = "last") -> Dialogues:
    return read_dialogues(Dataset.from_dict({"messages": TALKS}), make_tokenizer(), turns=turns)


def backend(server: CompletionServer, **options: Any) -> ServerBackend:
    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {"ends": [tokenizer.eos_token_id], "retries": 2, "concurrency": 4}
    settings |= {"base_url": server.url, "model": "tiny", "tokenizer": tokenizer}
    return ServerBackend(**(settings | options))


def ask(backend: Any, folder: Path, greedy_share: float = 1.0) -> Regenerated:
    return answer_dialogues(
        backend, dialogues(), SAMPLING, greedy_share=greedy_share, cache_dir=folder, progress=False
    )


@pytest.mark.parametrize("endpoint", ["auto", "chat"])
def test_the_server_gives_the_text_that_generate_gives_at_home(
    endpoint: Any, server: CompletionServer, model: Any, tmp_path: Path
) -> None:
    home = ask(TransformersBackend(TargetModel(model)), tmp_path / "home")
    there = ask(backend(server, endpoint=endpoint), tmp_path / "there")
    assert there.rows.to_dict() == home.rows.to_dict()
    assert there.accounting.done == len(TALKS) and not there.accounting.remarks
    assert all(("messages" in request) == (endpoint == "chat") for request in server.requests)


def test_auto_falls_back_to_chat_where_token_ids_are_not_taken(
    server: CompletionServer, tmp_path: Path
) -> None:
    server.takes_ids = False
    assert ask(backend(server), tmp_path).accounting.done == len(TALKS)
    assert [("messages" in request) for request in server.requests] == [False] + [True] * len(TALKS)
    windows = read_dialogues(Dataset.from_dict({"input_ids": [[1, 2]]}), None)
    with pytest.raises(ValueError, match=r"no token ids under /completions .* prompt must be"):
        answer_dialogues(backend(server), windows, SAMPLING, cache_dir=tmp_path, progress=False)


def test_sampled_requests_carry_temperature_and_a_seed_of_their_own(
    server: CompletionServer, tmp_path: Path
) -> None:
    ask(backend(server, endpoint="chat"), tmp_path, greedy_share=0.5)
    temperatures = sorted(request["temperature"] for request in server.requests)
    assert temperatures == [0.0] * 4 + [0.7] * 4
    assert len({request["seed"] for request in server.requests}) == len(TALKS)


def test_a_nucleus_that_is_asked_for_is_that_of_the_sampled_share(
    server: CompletionServer, tmp_path: Path
) -> None:
    sampling = Sampling(8, 1.1, top_p=0.9, top_k=5)
    answer_dialogues(backend(server), dialogues(), sampling, cache_dir=tmp_path, progress=False)
    asked = {(r["temperature"], r.get("top_p"), r.get("top_k")) for r in server.requests}
    assert asked == {(0.0, None, None), (1.1, 0.9, 5)}


def test_passing_failures_are_tried_again(server: CompletionServer, tmp_path: Path) -> None:
    server.failures = [503, 429]
    assert ask(backend(server, endpoint="chat"), tmp_path).accounting.done == len(TALKS)
    assert len(server.requests) == len(TALKS) + 2


def test_a_failed_prompt_is_counted_and_asked_again_by_the_next_run(
    server: CompletionServer, tmp_path: Path
) -> None:
    server.failures = [500, 400]
    first = ask(backend(server, endpoint="chat", retries=0, concurrency=1), tmp_path)
    counted = first.accounting
    assert (counted.done, counted.failed) == (6, {REFUSED: 1, SERVER_ERROR: 1})
    details = [problem["detail"] for problem in counted.problems]
    assert details == ["500: not now", "400: not now"]
    assert len(first.rows) == 6
    second = ask(backend(server, endpoint="chat"), tmp_path)
    assert (second.accounting.done, second.accounting.reused) == (8, 6)
    assert len(server.requests) == 8 + 2 + 1  # one to see whether anything is answered


def test_a_server_that_dies_ends_the_run_and_keeps_what_it_said(
    server: CompletionServer, tmp_path: Path
) -> None:
    talks = Dataset.from_dict({"messages": TALKS * 4})

    def many() -> Dialogues:
        return read_dialogues(talks, make_tokenizer())

    server.dies_after = 5
    mortal = backend(server, endpoint="chat", retries=0, concurrency=1)
    with pytest.raises(
        ValueError, match=r"answers nothing but errors .* what was answered is kept"
    ):
        answer_dialogues(mortal, many(), SAMPLING, cache_dir=tmp_path, progress=False)
    assert len(server.requests) in (5 + 16, 5 + 17)  # one may have been on its way
    server.dies_after = None
    resumed = answer_dialogues(
        backend(server, endpoint="chat"), many(), SAMPLING, cache_dir=tmp_path, progress=False
    )
    assert (resumed.accounting.done, resumed.accounting.reused) == (32, 5)


def test_several_servers_share_the_requests_and_one_that_is_gone_is_left_out(
    server: CompletionServer, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = ask(backend(server), tmp_path / "alone")
    server.requests.clear()
    with serving(model, make_tokenizer()) as second:
        urls = [server.url, second.url, "http://127.0.0.1:9/v1"]
        together = ask(backend(server, base_url=urls, retries=0), tmp_path / "together")
        assert len(server.requests) + len(second.requests) == len(TALKS) + 1  # one to try ids
        assert together.rows.to_dict() == alone.rows.to_dict() and together.accounting.done == 8
        assert min(len(server.requests), len(second.requests)) > 0
        assert caplog.text.count("no server answers at http://127.0.0.1:9/v1") == 1
        second.dies_after, before = 0, len(second.requests)  # one that only fails is asked less
        options: dict[str, Any] = {"endpoint": "chat", "concurrency": 1, "retries": 0}
        both = ask(backend(server, base_url=urls[1::-1], **options), tmp_path / "both")
        assert (both.accounting.done, len(second.requests)) == (len(TALKS) - 1, before + 1)
    again = ask(backend(server), tmp_path / "together")  # an answer is not an address's
    assert again.accounting.reused == 8


def test_nobody_there_is_one_sentence(server: CompletionServer, tmp_path: Path) -> None:
    nobody = ServerBackend("http://127.0.0.1:9/v1", "tiny", make_tokenizer(), ends=[], retries=0)
    with pytest.raises(ValueError, match=r"no server answers at http://127\.0\.0\.1:9/v1"):
        ask(nobody, tmp_path)


def test_the_key_comes_from_the_environment_and_stays_there(
    server: CompletionServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.key = "sesame-4711"
    with pytest.raises(
        ValueError, match=r"refuses access .* environment variable MY_KEY"
    ) as caught:
        ask(backend(server, api_key_variable="MY_KEY"), tmp_path)
    assert "sesame" not in str(caught.value)
    monkeypatch.setenv("MY_KEY", server.key)
    with caplog.at_level("DEBUG"):
        result = ask(backend(server, api_key_variable="MY_KEY"), tmp_path)
    assert server.authorizations[-1] == "Bearer sesame-4711"
    assert result.accounting.done == len(TALKS)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    kept = json.dumps([result.described, result.accounting.to_dict()], default=str).encode()
    assert not any(b"sesame" in text for text in [*written, kept, caplog.text.encode()])


def test_text_that_does_not_come_back_is_given_up(server: CompletionServer, tmp_path: Path) -> None:
    server.spoil = lambda text: text[:-1] + "\u00e9" if len(text) % 2 else text
    result = ask(backend(server), tmp_path)
    broken = result.accounting.failed[BROKEN_TEXT]
    assert broken and broken + result.accounting.done == len(TALKS)


def test_empty_answers_are_failures_and_are_kept(server: CompletionServer, tmp_path: Path) -> None:
    server.spoil = lambda text: "" if len(text) % 2 else text
    result = ask(backend(server), tmp_path)
    asked = len(server.requests)
    assert result.accounting.failed[EMPTY] and result.accounting.done
    assert ask(backend(server), tmp_path).accounting.failed == result.accounting.failed
    assert len(server.requests) == asked


def test_token_ids_of_the_server_spare_tokenising(
    server: CompletionServer, model: Any, tmp_path: Path
) -> None:
    server.sends_ids, server.spoil = True, lambda text: text + "\u00e9"
    home = ask(TransformersBackend(TargetModel(model)), tmp_path / "home")
    there = ask(backend(server, token_ids=True), tmp_path / "there")
    assert there.rows.to_dict() == home.rows.to_dict()


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": ["text"]},
        {"choices": [None]},
        {"choices": [{"text": "a"}], "usage": [1]},
        {"choices": [{"text": "a", "token_ids": [3, 10**6]}]},
        {"choices": [{"text": "a", "token_ids": ["3"]}]},
        {"choices": [{"text": "a", "token_ids": 3}]},
    ],
)
def test_replies_of_another_protocol_are_failures(
    reply: Any, server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = backend(server, token_ids=True, vocab_size=len(make_tokenizer()))
    monkeypatch.setattr(asked, "_post", lambda *_: (200, reply))
    with pytest.raises(ValueError, match="not the protocol"):
        ask(asked, tmp_path)


def test_a_key_that_the_server_repeats_is_starred_out(
    server: CompletionServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "now")  # which is what the server says
    server.failures = [400]
    result = ask(
        backend(server, endpoint="chat", concurrency=1, api_key_variable="MY_KEY"), tmp_path
    )
    assert result.accounting.problems[0]["detail"] == "400: not ***"


def test_who_leaves_does_not_wait_for_what_is_on_its_way(server: CompletionServer) -> None:
    prompts = [Prompt(talk.ask(0)[0], True, talk.row) for talk in dialogues()]
    release, served = Event(), iter([True, True])

    def held(text: str) -> str:
        if not next(served, False) and not release.wait(10):
            release.set()
        return text

    server.spoil = held
    asking: Any = backend(server, endpoint="completions").answer(
        lambda count: [prompts.pop() for _ in range(min(count, len(prompts)))],
        SAMPLING,
        on_tokens=lambda tokens: None,
    )
    assert next(asking) and next(asking)
    asking.close()
    waited = release.is_set()
    release.set()
    assert not waited


def test_another_template_on_the_server_is_remarked(
    server: CompletionServer, tmp_path: Path
) -> None:
    server.tokenizer.chat_template = server.tokenizer.chat_template.replace("a:", "answer:")
    result = ask(backend(server, endpoint="chat"), tmp_path)
    assert result.accounting.remarks == {OTHER_PROMPT: len(TALKS)}


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("localhost:8000", {}, "expected a base_url such as"),
        ("http://me:secret@host/v1", {}, "holds a password"),
        ("me:secret@host/v1", {}, "holds a password"),
        ("http://host/v1?key=secret", {}, "holds a password or a query"),
        ("http://host/v1", {"concurrency": 0}, "concurrency of at least 1"),
        ("http://host/v1", {"timeout": 1e10}, "timeout above 0 and of at most 86400"),
        ("http://host/v1", {"endpoint": "talk"}, "endpoint must be auto"),
    ],
)
def test_unusable_settings_are_refused(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ServerBackend(url, "tiny", make_tokenizer(), ends=[], **options)
    assert "secret" not in str(caught.value)
