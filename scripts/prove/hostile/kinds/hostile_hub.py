"""The tests' hub, whose answers somebody changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.hub.hub_api import Handler
from tests.hub.hub_server import LocalHub

Answer = tuple[int, bytes, dict[str, str]]
Tamper = Callable[[str, str, Answer], Answer]


class HostileHub(LocalHub):
    """The tests' hub, whose answers are changed on their way.

    Attributes:
        tamper: makes another answer of a request's method, path and true answer.
    """

    def __init__(self, users: dict[str, str]) -> None:
        super().__init__(users)
        self.tamper: Tamper = lambda method, path, answer: answer
        hub = self

        class Tampering(Handler):
            def _send(
                self, status: int, content: Any, headers: dict[str, str] | None = None
            ) -> None:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                said = {"Content-Length": str(len(data)), **(headers or {})}
                status, data, said = hub.tamper(self.command, self.path, (status, data, said))
                self.send_response(status)
                for name, value in said.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)
                if said.get("Content-Length") != str(len(data)):
                    self.close_connection = True

        Tampering.hub = self
        self._server.RequestHandlerClass = Tampering
