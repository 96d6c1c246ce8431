"""Texts by HTTP are those of generate(); clients that leave and clients that are too many."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from medusa_heads.inference.endpoint.choices import _event
from medusa_heads.inference.endpoint.server import Server
from medusa_heads.inference.endpoint.text import Text
from medusa_heads.inference.models.training_free import TrainingFreeModel
from scripts.prove.serving import joining_wrongly, make_jobs, serve
from tests.conftest import TinyLlama
from tests.inference.endpoint.asking import ask, begin, metrics, send
from tests.inference.speaking import make_tokenizer


@pytest.fixture
def server(endless: Any, tokenizer: Any) -> Iterator[Server]:
    with Server(endless, tokenizer, port=0, max_rows=1, queue=2, name="tiny") as running:
        yield running


@pytest.fixture(scope="module")
def standing(model: Any, tokenizer: Any) -> Iterator[Server]:
    """One for all who are refused: each server that ends waits for a moment."""
    with Server(model, tokenizer, port=0, max_rows=1, queue=2, name="tiny") as running:
        yield running


def test_texts_of_clients_that_come_and_go_are_those_of_generate(
    model: Any, tokenizer: Any
) -> None:
    """Sixteen such as `python -m scripts.prove.serving` asks for by the thousand."""
    jobs = make_jobs(model, tokenizer, 16, kinds=6, seed=0)
    outcome = serve(model, tokenizer, jobs, clients=6, max_rows=3, queue=2)
    assert not outcome.wrong and not outcome.faults
    assert outcome.ended["finished"] + outcome.ended["left"] == 16 and outcome.ended["left"] > 2


def test_rows_that_join_wrongly_are_noticed(model: Any, tokenizer: Any) -> None:
    jobs = make_jobs(model, tokenizer, 9, kinds=4, seed=0)
    with joining_wrongly():
        assert serve(model, tokenizer, jobs, clients=6, max_rows=3, queue=6).wrong


def test_streams_and_conversations(server: Server, endless: Any, tokenizer: Any) -> None:
    turn = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    ids_1T = tokenizer("u:hia:", return_tensors="pt", return_token_type_ids=False)
    text_1T = endless.generate(**ids_1T, max_new_tokens=12, do_sample=False)
    expected = tokenizer.decode(text_1T[0, ids_1T["input_ids"].shape[1] :])
    status, whole = ask(server, "/v1/chat/completions", turn)
    assert status == 200 and whole["choices"][0]["message"]["content"] == expected
    status, raw = ask(
        server,
        "/v1/chat/completions",
        turn | {"stream": True, "stream_options": {"include_usage": True}},
    )
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    *pieces, end, counts = map(json.loads, events[:-1])
    assert events[-1] == "[DONE]" and end["choices"][0]["finish_reason"] == "length"
    said = [piece["choices"][0]["delta"].get("content", "") for piece in pieces]
    assert "".join(said) == expected
    assert counts["usage"]["completion_tokens"] == 12 and counts["choices"] == []
    assert ask(server, "/v1/models")[1]["data"][0]["id"] == "tiny"
    assert ask(server, "/health") == (200, {"status": "ok"})
    assert "medusa_heads_generated_tokens_total 24" in metrics(server)


@pytest.mark.parametrize(("rows", "tokens"), [(2, 40), (1, 64)])
def test_what_nobody_limits_ends_where_the_positions_of_rows_do(
    rows: int, tokens: int, tiny_llama: TinyLlama, tokenizer: Any
) -> None:
    """Beyond that, rows of a batch would turn one another's positions."""
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
    model = tiny_llama(
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        rope_parameters=rope | {"original_max_position_embeddings": 40},
    )
    turn = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    made = TrainingFreeModel(model, "recycling")
    with Server(made, tokenizer, port=0, max_rows=rows) as server:
        status, answer = ask(server, "/v1/chat/completions", turn)
    assert status == 200 and answer["usage"]["total_tokens"] == tokens


@pytest.mark.parametrize("asked", [None, "zz"])
def test_strings_at_which_the_target_itself_stops(
    asked: str | None, endless: Any, tokenizer: Any, monkeypatch: Any
) -> None:
    """In place of which a request may name others."""
    ids_1T = tokenizer("abc", return_tensors="pt", return_token_type_ids=False)
    text_1T = endless.generate(**ids_1T, max_new_tokens=20, do_sample=False)
    written = tokenizer.decode(text_1T[0, 3:])
    own = written[7:9]
    monkeypatch.setattr(endless.target.model.generation_config, "stop_strings", [own])
    with Server(endless, tokenizer, port=0) as stopping:
        body = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "stop": asked}
        status, answer = ask(stopping, "/v1/completions", body)
    expected = (written.partition(own)[0], "stop") if asked is None else (written, "length")
    choice = answer["choices"][0] if status == 200 else answer
    assert (choice["text"], choice["finish_reason"]) == expected


def test_too_many_are_told_to_come_later(server: Server, endless: Any) -> None:
    """While the target is held, one text is begun and two wait."""
    taken, refused = [], None
    with endless._lock:
        while refused is None:
            connection, response = begin(server)
            if response.status == 200:
                taken.append(connection)
                assert len(taken) <= 3
            else:
                refused = response
        assert refused.status == 429 and int(refused.headers["Retry-After"]) >= 1
        error = json.loads(refused.read())["error"]
        assert error["type"] == "rate_limit_error" and "try again in" in error["message"]
        connection.close()
    for connection in taken:
        connection.close()


@pytest.fixture
def noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a client's leaving has come to the scheduler."""
    cancel, event = server.scheduler.cancel, threading.Event()

    def note(text: Any) -> None:
        cancel(text)
        event.set()

    monkeypatch.setattr(server.scheduler, "cancel", note)
    return event


def test_who_leaves_in_the_middle_frees_the_row(
    server: Server, endless: Any, noticed: threading.Event
) -> None:
    connection, response = begin(server)
    assert b"data: " in response.readline()
    with endless._lock:  # so that the text cannot come to its end meanwhile
        response.close()
        connection.close()
        assert noticed.wait(60)
    assert ask(server, "/v1/completions", {"prompt": "abc", "max_tokens": 3})[0] == 200
    text = metrics(server)
    assert 'requests_total{outcome="cancelled"} 1\n' in text and "cache_bytes 0\n" in text


def test_who_leaves_without_a_stream_frees_the_row(
    server: Server, endless: Any, noticed: threading.Event
) -> None:
    with endless._lock:
        connection = send(server, "/v1/completions", {"prompt": "abc", "max_tokens": 400})
        while server.scheduler.is_idle():
            time.sleep(0.01)
        connection.close()
        assert noticed.wait(60)
    assert 'requests_total{outcome="cancelled"} 1\n' in metrics(server)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", {"prompt": "a", "n": 4}, 400, "may ask for 3 texts here"),
        ("/v1/completions", {"prompt": "a" * 600}, 400, "context of 512"),
        ("/v1/completions", {"prompt": "a", "model": "gpt"}, 404, "no model 'gpt' here"),
        ("/v1/completions", b"x" * ((4 << 20) + 1), 413, "at most"),
        ("/v1/completions", None, 405, "Method Not Allowed"),
        ("/v1/embeddings", {}, 404, "Not Found: there are /v1/completions, "),
        ("/v1/models/gpt", None, 404, "no model 'gpt' here, only 'tiny'"),
    ],
    ids=str,
)
def test_what_is_refused(standing: Server, path: str, body: Any, status: int, said: str) -> None:
    answered, content = ask(standing, path, body)
    error = content["error"]
    assert answered == status and said in error["message"]
    # Typed clients fail on any other shape, and their users never see the message.
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == str(status)


def test_one_model_by_its_name(endless: Any, tokenizer: Any) -> None:
    with Server(endless, tokenizer, port=0, name="some/one") as server:
        for path in ("some/one", "some%2Fone"):
            assert ask(server, f"/v1/models/{path}")[1]["id"] == "some/one"
        assert ask(server, "/v1/models/some")[0] == 404


def test_an_event_is_one_line_for_all_clients() -> None:
    """httpx and others end lines wherever Python does."""
    said = "a\x85b\u2028c\u2029d\x0be\x1cf\n\U0001f600"
    (line,) = [each for each in _event({"text": said}).splitlines() if each]
    assert json.loads(line.removeprefix("data: ")) == {"text": said} and "\U0001f600" in line


def test_spaces_that_a_tokenizer_would_clean_away_stay(endless: Any) -> None:
    """It would do so within what it decodes at once, and so by how many tokens a step commits."""
    cleaning, said = make_tokenizer(), "I do n't , he 's ."
    cleaning.clean_up_tokenization_spaces = True
    cleaning.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = cleaning(said)["input_ids"]
    assert cleaning.decode(ids) != said
    with Server(endless, cleaning, port=0) as server, endless._lock:
        told: list[str] = []
        text = Text([1], 99, tell=lambda piece, _: told.append(piece))
        text.begin(server.scheduler._decode)
        for start in range(0, len(ids), 3):
            for token in ids[start : start + 3]:
                text.put(torch.tensor([token]))
            text.end_step()
        text.flush()
    assert "".join(told) == said


def test_what_is_refused_is_counted(server: Server) -> None:
    talk = {"messages": [{"role": "bot", "content": "hi"}]}
    assert ask(server, "/v1/chat/completions", talk)[0] == 400
    assert ask(server, "/v1/completions", {"prompt": "a", "model": "gpt"})[0] == 404
    assert 'requests_total{outcome="refused"} 2\n' in metrics(server)


def test_what_fails_while_it_is_written_is_said(server: Server, monkeypatch: Any) -> None:
    def fall(*_: Any) -> None:
        raise RuntimeError("/home/somebody/secret")

    monkeypatch.setattr("medusa_heads.inference.engine.running.take_step", fall)
    body = {"prompt": "abc", "max_tokens": 9, "temperature": 0}
    status, content = ask(server, "/v1/completions", body)
    assert status == 500 and content["error"]["message"].endswith("written (RuntimeError)")
    status, content = ask(server, "/v1/completions", body | {"stream": True})
    assert status == 200 and '"code": "500"' in content and content.endswith("[DONE]\n\n")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000", "Origin": "http://127.0.0.1:3000"}, 200),
        ({"Host": "LOCALHOST:8765", "Origin": "http://LocalHost"}, 200),
        ({"Host": "page.example"}, 403),
        ({"Host": "page.example:8000", "Origin": "http://page.example:8000"}, 403),
        ({"Origin": "https://page.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "["}, 403),
    ],
    ids=str,
)
def test_pages_in_a_browser_are_told_nothing(
    standing: Server, headers: dict[str, str], status: int
) -> None:
    """Neither those whose name was made to mean this machine, nor those that send to it."""
    asked = {"prompt": "a", "max_tokens": 1}
    assert ask(standing, "/v1/completions", asked, **headers)[0] == status
    assert ask(standing, "/metrics", **headers)[0] == status


def test_an_api_key(endless: Any, tokenizer: Any) -> None:
    with Server(endless, tokenizer, port=0, api_key="s3cret") as server:
        body = {"prompt": "abc", "max_tokens": 2}
        for wrong in ("", "Bearer other", "s3cret", "Basic s3cret", "Bearer"):
            given = {"Authorization": wrong} if wrong else {}
            assert ask(server, "/v1/completions", body, **given)[0] == 401
            assert ask(server, "/metrics", **given)[0] == 401
        for right in ("Bearer s3cret", "bearer s3cret"):
            assert ask(server, "/v1/completions", body, Authorization=right)[0] == 200
        assert ask(server, "/health")[0] == 200


@pytest.mark.parametrize("key", ["schl\u00fcssel", "a\udcffb"])
def test_an_api_key_of_any_bytes(endless: Any, tokenizer: Any, key: str) -> None:
    with Server(endless, tokenizer, port=0, api_key=key) as server:
        sent = key.encode(errors="surrogateescape").decode("latin-1")
        assert ask(server, "/v1/models", Authorization=f"Bearer {sent}")[0] == 200
        assert ask(server, "/v1/models", Authorization="Bearer \u00fc")[0] == 401


def test_a_port_that_is_taken(server: Server, endless: Any, tokenizer: Any) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ValueError, match=f"nobody can listen at 127.0.0.1, port {port}"):
        Server(endless, tokenizer, port=port)
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        Server(endless, tokenizer, max_rows=0)
