"""Requests to a server, as a client of no library makes them."""

from __future__ import annotations

import json
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from medusa_heads.inference.endpoint.server import Server


def send(server: Server, path: str, body: Any = None, **headers: str) -> HTTPConnection:
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    raw = body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, raw, headers)
    return connection


def ask(server: Server, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    with closing(send(server, path, body, **headers)) as connection:
        response = connection.getresponse()
        said = response.read().decode()
    return response.status, json.loads(said) if said[:1] == "{" else said


def metrics(server: Server) -> str:
    """Once all is counted."""
    while not server.scheduler.is_idle():
        time.sleep(0.01)
    text: str = ask(server, "/metrics")[1]
    return text


def begin(server: Server, tokens: int = 400) -> tuple[HTTPConnection, HTTPResponse]:
    """A stream that was taken, or refused."""
    body = {"prompt": "abc", "max_tokens": tokens, "temperature": 0, "stream": True}
    connection = send(server, "/v1/completions", body)
    return connection, connection.getresponse()
