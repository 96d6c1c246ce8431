"""Requests to a server: pooled, retried, with a key that nobody gets to see."""

from __future__ import annotations

import json
import os
from functools import partial
from threading import Lock
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import PoolManager, ProxyManager, Retry, Timeout
from urllib3.exceptions import HTTPError

from medusa_heads.files import parse_json

SHOWN = 200  # characters of a server's own words
_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_NOT_FOR_US = (401, 403)
_LONGEST_PAUSE = 30.0  # seconds between two tries


class Unreachable(Exception):
    """No answer came, after all retries."""


class ServerConnection:
    """Posts JSON.

    Args:
        base_url: up to and including the version, such as `http://localhost:8000/v1`.
        concurrency: connections at the same time.
        retries: of a request that failed in passing, with growing pauses.
        timeout: seconds without a byte before a request has failed.
        api_key_variable: environment variable that holds the API key, if any. The key itself is
            neither kept nor written anywhere.

    Raises:
        ValueError: a URL that is none, or a size out of range.
    """

    def __init__(
        self,
        base_url: str,
        *,
        concurrency: int,
        retries: int,
        timeout: float,
        api_key_variable: str,
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ValueError(
                f"expected a base_url such as http://localhost:8000/v1, got {base_url!r}"
            )
        if url.username or url.password:
            raise ValueError(
                f"base_url holds a password: put the key into the variable {api_key_variable}"
            )
        if concurrency < 1 or retries < 0 or timeout <= 0:
            raise ValueError(
                "expected a concurrency of at least 1, retries of at least 0 and a timeout above "
                f"0, got {concurrency}, {retries} and {timeout}"
            )
        self.base_url = base_url.rstrip("/")
        self._key_variable = api_key_variable
        retry = Retry(
            total=retries,
            read=min(retries, 2),  # of requests that had reached it, and may have run into timeout
            status_forcelist=_RETRIED,
            allowed_methods=None,  # POST too: an answer asked for twice does no harm
            backoff_factor=0.5,
            backoff_max=_LONGEST_PAUSE,
            backoff_jitter=0.5,
            raise_on_status=False,
        )
        proxy = getproxies().get(url.scheme)
        pool = PoolManager
        if proxy and not proxy_bypass(url.hostname or ""):
            pool = partial(ProxyManager, proxy)  # type: ignore[assignment]
        self._pool = pool(maxsize=concurrency, block=True, retries=retry, timeout=Timeout(timeout))

    def post(self, path: str, request: dict[str, Any]) -> tuple[int, Any]:
        """The status and the reply, as JSON or else as text.

        Raises:
            Unreachable: nobody answered.
            ValueError: the server refuses access.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._key_variable):
            headers["Authorization"] = f"Bearer {key}"
        try:
            response = self._pool.request(
                "POST", f"{self.base_url}/{path}", body=json.dumps(request), headers=headers
            )
        except HTTPError as error:
            raise Unreachable(type(getattr(error, "reason", None) or error).__name__) from error
        text = response.data.decode("utf-8", "replace")
        try:
            reply = parse_json(text)
        except ValueError:
            reply = text
        if response.status in _NOT_FOR_US:
            raise ValueError(
                f"{self.base_url} refuses access ({response.status}): put the API key into the "
                f"environment variable {self._key_variable}"
            )
        return response.status, reply


class DeathWatch:
    """Notices when a server has gone for good: asking on would take hours and bring nothing.

    Args:
        patience: failures in a row, with no answer between them.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._in_a_row = 0
        self._lived = False
        self._lock = Lock()

    def answered(self) -> None:
        """It lives."""
        with self._lock:
            self._in_a_row, self._lived = 0, True

    def failed(self, what: str, *, at_once: bool = False) -> None:
        """Count it. `at_once`: a server that never answered is not waited for.

        Raises:
            ValueError: the server is given up.
        """
        with self._lock:
            self._in_a_row += 1
            if self._in_a_row >= self._patience or (at_once and not self._lived):
                raise ValueError(
                    f"{what}: what was answered is kept, and the same command goes on from there"
                )


def words(reply: Any) -> str:
    """What a server says is wrong."""
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        reply = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(reply).split())[:SHOWN]
