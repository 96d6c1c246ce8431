"""Pages in a browser: whose may ask, and how their browsers are told."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

_ANY = "*"


def origins_of(named: Collection[str]) -> frozenset[str]:
    """Origins as browsers write them: a scheme, a host and perhaps a port, in small letters; `*`
    is any. Raises ValueError: one is none, and would match nothing."""
    for origin in named:
        if (
            origin != _ANY
            and re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/?#@,]+", origin) is None
        ):
            raise ValueError(
                f"an allowed origin is such as https://page.example or http://localhost:3000, "
                f"without a path or a slash at its end, or * for any, got {origin!r}"
            )
    return frozenset(map(str.lower, named))


def for_pages_of(origins: Collection[str]) -> list[Middleware]:
    """What answers their browsers, which ask beforehand; nothing where no page may ask."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's client tells some of its own
            allow_private_network=True,
            expose_headers=("Retry-After",),
        )
    ]


def strangers(request: Request, hosts: Collection[str], origins: Collection[str]) -> set[str]:
    """What is asked by other names than these hosts', or by a browser for a page that is neither of
    these hosts nor of an origin that may ask. Any page's name can be made to mean this machine."""
    asked = [request.headers.get("host", "localhost")]
    if _ANY not in origins:
        pages = {origin.lower() for origin in request.headers.getlist("origin")}
        asked += [origin.partition("://")[2] for origin in pages - {*origins}]
    return {re.sub(r":\d+$", "", host).lower() for host in asked} - {*hosts}
