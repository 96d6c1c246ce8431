"""Pages in a browser ask, and read the answer, where their origin was named; no others do."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from medusa_heads.inference.endpoint.origins import origins_of
from medusa_heads.inference.endpoint.server import Server
from tests.inference.endpoint.asking import ask, send

PAGE = "https://page.example"
BODY = {"prompt": "abc", "max_tokens": 2}


def preflight(server: Server, origin: str, **headers: str) -> HTTPResponse:
    """What a browser asks before it sends JSON, or a key."""
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=60)) as connection:
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
            **headers,
        }
        connection.request("OPTIONS", "/v1/completions", headers=headers)
        response = connection.getresponse()
        response.read()
    return response


def readable_by(server: Server, origin: str) -> tuple[int, str | None]:
    """The status for a page, and whose page may read the answer."""
    with closing(send(server, "/v1/completions", BODY, Origin=origin)) as connection:
        response = connection.getresponse()
        return response.status, response.getheader("access-control-allow-origin")


def test_by_default_no_page_is_told_anything(endless: Any, tokenizer: Any) -> None:
    with Server(endless, tokenizer, port=0) as server:
        answer = preflight(server, PAGE)
        assert answer.status == 405 and not answer.getheader("access-control-allow-origin")
        assert readable_by(server, PAGE) == (403, None)
        assert readable_by(server, "http://localhost:3000") == (200, None)


def test_a_page_that_was_named(endless: Any, tokenizer: Any) -> None:
    with Server(endless, tokenizer, port=0, allowed_origins=["HTTPS://page.example"]) as server:
        answer = preflight(server, PAGE)
        allowed = (answer.getheader("access-control-allow-headers") or "").split(",")
        assert answer.status == 200 and {"authorization", "x-stainless-os"} <= {*allowed}
        assert readable_by(server, PAGE) == (200, PAGE)
        with closing(send(server, "/v1/models", Origin=PAGE)) as connection:
            told = connection.getresponse()
            assert told.getheader("access-control-expose-headers") == "Retry-After"
        for other in ("http://page.example", "https://page.example:8443", "null"):
            assert preflight(server, other).status == 400
            assert readable_by(server, other) == (403, None)
        # A name that was made to mean this machine is still none of its own.
        assert ask(server, "/v1/completions", BODY, Host="page.example", Origin=PAGE)[0] == 403


def test_any_page_with_a_key_and_without(endless: Any, tokenizer: Any) -> None:
    with Server(endless, tokenizer, port=0, allowed_origins="*") as server:
        assert preflight(server, "null").status == 200
        assert readable_by(server, PAGE) == (200, "*")
    with Server(endless, tokenizer, port=0, allowed_origins=["*"], api_key="s3cret") as server:
        assert preflight(server, PAGE).status == 200
        assert readable_by(server, PAGE) == (401, "*")  # the page can read why


@pytest.mark.parametrize(
    "origin",
    [
        "page.example",
        "https://page.example/",
        "https://page.example/chat",
        "null",
        "",
        "http://a b",
    ],
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ValueError, match="an allowed origin is such as "):
        origins_of(["*", origin])


@pytest.mark.parametrize("key", ["", " "])
def test_a_key_that_is_empty_keeps_nobody_out(key: str, endless: Any, tokenizer: Any) -> None:
    """And would let pages of any name ask, as if there were one."""
    with pytest.raises(ValueError, match="the API key is empty"):
        Server(endless, tokenizer, port=0, api_key=key)


def test_a_key_is_what_headers_say_of_it(endless: Any, tokenizer: Any) -> None:
    """Without the white space around it."""
    with Server(endless, tokenizer, port=0, api_key=" s3cret\n") as server:
        assert ask(server, "/v1/models", Authorization="Bearer s3cret")[0] == 200
        assert ask(server, "/v1/models")[0] == 401
