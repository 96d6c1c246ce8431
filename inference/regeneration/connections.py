"""The servers that hold the target, and the way there: tries, keys, proxies, and who is gone."""

from __future__ import annotations

import logging
import os
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import PoolManager, ProxyManager, Retry, Timeout
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url

from medusa_heads.files import parse_json
from medusa_heads.masking import MASK

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_NOT_FOR_US = (401, 403)
_LONGEST_PAUSE = 30.0  # seconds between two tries


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Server:
    url: str
    pool: PoolManager
    under_way: int = 0  # requests
    errors: int = 0  # of its own, in a row


class _Tries(Retry):
    """Obeys a server that asks for a pause, but for no longer one than others."""

    def parse_retry_after(self, retry_after: str) -> float:
        try:
            asked = super().parse_retry_after(retry_after)
        except (HTTPError, ValueError, OverflowError):
            return 0.0  # what cannot be read asks for none
        return min(asked, _LONGEST_PAUSE)


class Servers:
    """Each request goes to the server with the fewest under way, an error in a row counting as one
    more; one that is gone is left out. Raises ValueError: a URL, a key or a proxy that is none.

    Args:
        retries: of a request that failed in passing, with growing pauses.
        timeout: seconds without a byte before a request has failed.
        connections: to each of them, at the same time.
        key_variable: that holds the API key, if any.

    Attributes:
        where: their addresses, for a reader.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        retries: int,
        timeout: float,
        connections: int,
        key_variable: str,
    ) -> None:
        for url in map(urlsplit, urls):
            if "@" in (url.netloc or url.path) or url.query:
                raise ValueError(
                    "base_url holds a password or a query: put the key into the variable "
                    f"{key_variable}"
                )
            if url.scheme not in ("http", "https") or not url.netloc:
                raise ValueError(
                    f"expected a base_url such as http://localhost:8000/v1, got {url.geturl()!r}"
                )
        _key(key_variable)
        self._key_variable, self._lock = key_variable, Lock()
        retry = _Tries(
            total=retries,
            read=min(retries, 2),  # of requests that reached it, and may have run into timeout
            status_forcelist=_RETRIED,
            allowed_methods=None,  # POST too: an answer asked for twice does no harm
            backoff_factor=0.5,
            backoff_max=_LONGEST_PAUSE,
            backoff_jitter=0.5,
            raise_on_status=False,
        )
        pool: dict[str, Any] = {"maxsize": connections, "block": True, "retries": retry}
        pool["timeout"] = Timeout(timeout)
        self._servers = []
        for url in map(urlsplit, urls):
            proxy = None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)
            reached = _through(proxy, url.scheme, pool) if proxy else PoolManager(**pool)
            self._servers.append(_Server(url.geturl().rstrip("/"), reached))
        self.where = " and ".join(server.url for server in self._servers)

    def post(self, path: str, body: str) -> tuple[int, Any]:
        """The status and the reply, as JSON or else as text; status 0 and why, if none came after
        all retries. Raises ValueError: the server refuses access."""
        headers = {"Content-Type": "application/json"}
        if key := _key(self._key_variable):
            headers["Authorization"] = f"Bearer {key}"
        while True:
            with self._lock:
                server = min(self._servers, key=lambda each: each.under_way + each.errors)
                server.under_way += 1
            try:
                response = server.pool.request(
                    "POST", server.url + path, body=body, headers=headers
                )
                server.errors = server.errors + 1 if response.status >= 500 else 0
                break
            except HTTPError as error:
                reason = type(getattr(error, "reason", None) or error).__name__
                if not self._leave_out(server, reason):
                    return 0, reason
            finally:
                with self._lock:
                    server.under_way -= 1
        if response.status in _NOT_FOR_US:
            raise ValueError(
                f"{self.where} refuses access ({response.status}): put the API key into the "
                f"environment variable {self._key_variable}"
            )
        text = response.data.decode("utf-8", "replace")
        if key and response.status != 200:  # what a server complains of is written down
            text = text.replace(key, MASK)
        try:
            return response.status, parse_json(text)
        except ValueError:
            return response.status, text

    def _leave_out(self, server: _Server, reason: str) -> bool:
        """Ask a server no more, if there are others."""
        with self._lock:
            if server in self._servers and len(self._servers) > 1:
                logger.warning("no server answers at %s (%s): it is left out", server.url, reason)
                self._servers.remove(server)
            return server not in self._servers


def _through(proxy: str, scheme: str, pool: dict[str, Any]) -> PoolManager:
    """The way through a proxy of the environment. Its password goes into a header alone, which
    nothing prints. Raises ValueError: it is none."""
    try:
        url = parse_url(proxy if "://" in proxy else f"http://{proxy}")
        headers = {}
        if url.auth:
            login = b64encode(unquote_to_bytes(url.auth)).decode()
            headers["Proxy-Authorization"] = f"Basic {login}"
        return ProxyManager(url._replace(auth=None).url, proxy_headers=headers, **pool)
    except HTTPError:
        raise ValueError(
            f"the proxy in {scheme}_proxy cannot be used: expected one such as http://host:3128"
        ) from None


def _key(variable: str) -> str | None:
    """The API key in an environment variable, without white space around it. Raises ValueError: it
    cannot stand in a request; an HTTP library's own words would quote it."""
    said = os.environ.get(variable)
    if not said:
        return None
    key = said.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"the environment variable {variable} holds no API key: it is blank, or has a space, a "
            "line break or other characters in it that cannot stand in a request"
        )
    return key
