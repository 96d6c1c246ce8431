"""A model behind a port of this machine."""

from __future__ import annotations

import asyncio
import copy
import ipaddress
import socket
import threading
from collections.abc import Collection
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import uvicorn

from medusa_heads.data.pieces import as_written
from medusa_heads.inference.endpoint.app import make_app
from medusa_heads.inference.endpoint.origins import origins_of
from medusa_heads.inference.endpoint.protocol import MOST_TEXTS
from medusa_heads.inference.endpoint.reading import Reading
from medusa_heads.inference.endpoint.scheduler import Scheduler
from medusa_heads.inference.engine.running import RunningBatch
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.loading import load_tokenizer
from medusa_heads.target.positions import longest_of_rows
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from medusa_heads.inference.models.assisted import AssistedModel

_TO_THE_END = 5  # seconds in which answers may come to their end once the server is told to stop
_TO_BE_TOLD = 2  # further ones in which their clients may read that they have none


class Server:
    """A model's texts by HTTP, while it is entered or run.

    Args:
        model: which nobody else needs in the meantime; its generate() still works, between steps.
        tokenizer: of its target; by default loaded from where that came from.
        host, port: where to listen; port 0: a free one.
        max_rows: texts that are written at a time.
        queue: texts that may wait besides; more are answered with 429.
        cache_bytes: that keys and values may take; None: as much as the rows need.
        kept_bytes: that those of ended texts may take besides, which are kept for prompts that
            begin alike; 0: none are.
        api_key: that clients must send, without the white space around it; None: none.
        name: of the model for clients; by default its target's.
        allowed_origins: of web pages that may ask, such as `"https://page.example"`; `"*"`: of all.

    Raises:
        ValueError: the port is taken, an origin is none, the key is empty, or the model cannot be
            decoded in rows that come and go, or not by its own generation settings.

    Attributes:
        url: where it listens.
        scheduler: who is served when.
    """

    def __init__(
        self,
        model: AssistedModel,
        tokenizer: Any = None,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        max_rows: int = 8,
        queue: int = 64,
        cache_bytes: int | None = None,
        kept_bytes: int = 1_000_000_000,
        api_key: str | None = None,
        name: str | None = None,
        allowed_origins: Collection[str] = (),
    ) -> None:
        for what, number in (("max_rows", max_rows), ("queue", queue)):
            if number < 1:
                raise ValueError(f"{what} must be at least 1, got {number}")
        if api_key is not None and not (api_key := api_key.strip()):  # as headers are
            raise ValueError("the API key is empty: leave it out, or give one")
        origins = origins_of(allowed_origins)
        target = model.target
        batch = model.running_batch(max_rows, kept_bytes)
        _check_settings(batch, target)
        self.alone = batch.alone
        if tokenizer is None:
            tokenizer = load_tokenizer(target.name_or_path, revision=target.revision)
        own = copy.deepcopy(tokenizer)  # threads read with it, another one writes
        decode = as_written(own, skip_special_tokens=True)
        self.scheduler = Scheduler(
            batch,
            target.model,
            decode,
            spell=as_written(own),
            queue=queue,
            cache_bytes=cache_bytes,
        )
        longest = longest_of_rows(target.model) if batch.max_rows > 1 else None
        most_texts = min(MOST_TEXTS, self.scheduler.most)
        self._reading = Reading(target, tokenizer, longest, most_texts)
        self._socket = _listening(host, port)
        address, bound = self._socket.getsockname()[:2]
        called = f"[{host}]" if ":" in host else host
        self.url = f"http://{called}:{bound}"
        # Who listens for this machine alone would else answer any page that its browser shows.
        local = api_key is None and ipaddress.ip_address(address).is_loopback
        app = make_app(
            self.scheduler,
            self._reading,
            name or target.name_or_path or "model",
            api_key=api_key,
            hosts={"localhost", "127.0.0.1", "[::1]", called.lower()} if local else None,
            origins=origins,
        )
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_TO_THE_END + 2 * _TO_BE_TOLD,
        )
        self._server = _Listening(config, self.scheduler)
        self._leaving = ExitStack()

    @staticmethod
    def check_place(host: str, port: int, allowed_origins: Collection[str] = ()) -> None:
        """Raises ValueError: nobody can listen there, or an origin is none."""
        origins_of(allowed_origins)
        _listening(host, port).close()

    def run(self) -> None:
        """Answer until SIGINT or SIGTERM, which is raised again once the last answer has ended."""
        # From here on a signal waits: raised while a thread starts, it would leave one that never
        # ends.
        with self._server.capture_signals(), self._socket, self._reading, self.scheduler:
            self._server.run([self._socket])

    def __enter__(self) -> Server:
        self._leaving.enter_context(self._socket)
        self._leaving.enter_context(self._reading)
        thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="medusa-heads endpoint"
        )
        thread.start()

        def stop() -> None:
            self._server.should_exit = True
            thread.join()

        self._leaving.callback(stop)
        # Closed first: what is still being written fails, and nobody waits for its end.
        self._leaving.enter_context(self.scheduler)
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()


class _Listening(uvicorn.Server):
    """Told to end, it ends the texts before the connections, so that clients hear of it. A task
    that uvicorn itself has to cancel leaves a traceback."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self._scheduler = scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Once told to; told twice, at once."""
        later = asyncio.get_running_loop().call_later
        timers = [
            later(_TO_THE_END, self._scheduler.close),
            later(_TO_THE_END + _TO_BE_TOLD, self._leave_clients),
        ]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()
        if left := [*self.server_state.tasks]:
            self._scheduler.close()
            await asyncio.wait(left, timeout=_TO_BE_TOLD)
            self._leave_clients()
            await asyncio.wait(left, timeout=_TO_BE_TOLD)

    def _leave_clients(self) -> None:
        for connection in [*self.server_state.connections]:
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()


def _check_settings(batch: RunningBatch, target: TargetModel) -> None:
    """Raises ValueError: settings of the target's own, which clients do not choose, would refuse
    every request."""
    ids_11 = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    short: dict[str, Any] = {"max_new_tokens": 1, "min_new_tokens": None, "min_length": 0}
    try:
        batch.add(ids_11, seed=0, do_sample=False, stop_strings=None, **short)
    except (ValueError, ImportError) as error:
        raise ValueError(
            "no request could be answered by the target's own generation settings: "
            f"{' '.join(str(error).split())}; change its generation_config"
        ) from error
    batch.stats = GenerationStats()


def _listening(host: str, port: int) -> socket.socket:
    """Raises ValueError: nobody can listen there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"nobody can listen at {host}, port {port} ({reason}): give another --port or --host"
        ) from error
    return made
