"""A hub on this machine.

with LocalHub({"hf_alice": "alice"}) as hub: ...   # HF_ENDPOINT=hub.url
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub.hub_api import Handler
from tests.hub.repository import Repository


class LocalHub:
    """Serves until the block is left.

    Args:
        users: token -> user. A user writes below their own name, and reads what is public.

    Attributes:
        requests: method and path of each request, in order.
        before: called with a request's method and path before it is answered; what it raises as
            `Refusal` is the answer, and for any other error the connection is closed without one.
    """

    def __init__(self, users: dict[str, str]) -> None:
        self.users = users
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], object] = lambda method, path: None
        self.closed = False
        self.lock = threading.Lock()
        handler = type("Handler", (Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True  # for connections that are kept open
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def interfering(self, before: Callable[[str, str], object]) -> Iterator[None]:
        """`before` is called within the block only."""
        self.before = before
        try:
            yield
        finally:
            self.before = lambda method, path: None

    def upload(self, repo_id: str, files: dict[str, bytes], *, private: bool = False) -> str:
        """What somebody else put there; returns the commit."""
        made = self.repositories.setdefault(repo_id, Repository(private))
        return made.commit("main", files, "Upload")


def log_in(hub: LocalHub, token: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process speak to the hub, with caches of its own.

    The client reads its settings when it is imported, here with HF_HUB_OFFLINE=1: what HF_ENDPOINT,
    HF_HUB_CACHE and HF_HUB_DISABLE_XET would have set then is set now.
    """
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub-cache"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # which keeps its endpoint
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
