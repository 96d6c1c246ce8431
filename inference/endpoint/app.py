"""The routes: completions and chat completions as OpenAI has them, models, health and metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from medusa_heads.inference.endpoint.answers import Answer, refused
from medusa_heads.inference.endpoint.choices import Choices, Failed
from medusa_heads.inference.endpoint.origins import for_pages_of, strangers
from medusa_heads.inference.endpoint.reading import Reading
from medusa_heads.inference.endpoint.scheduler import Closed, Overloaded, Scheduler

_LARGEST = 4 << 20  # bytes of a request's body
_PATHS = "/v1/completions, /v1/chat/completions, /v1/models, /metrics and /health"


def make_app(
    scheduler: Scheduler,
    reading: Reading,
    name: str,
    *,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    origins: Collection[str] = (),
) -> Starlette:
    """An application that answers for one model.

    Args:
        scheduler: writes the texts.
        reading: reads the requests.
        name: of the model, as clients call it.
        api_key: without which nothing but the health is told; None: everybody is told.
        hosts: names by which clients and the pages that they show call this machine; None: any.
        origins: of other pages whose browsers may ask, and read the answers; `*`: of any.
    """
    created = int(time.time())
    # As its bytes are in the environment, and in a header.
    expected = None if api_key is None else api_key.encode(errors="surrogateescape")

    async def health(_: Request) -> Response:
        if not scheduler.is_open:
            return _refusal(503, "nothing is written any more")
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(scheduler.metrics.text(), media_type="text/plain; version=0.0.4")

    known = {"id": name, "object": "model", "created": created, "owned_by": "medusa-heads"}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [known]})

    async def model(request: Request) -> Response:
        if (asked := request.path_params["name"]) != name:
            return _refusal(404, _no_model(asked, name))
        return JSONResponse(known)

    def refuse(status: int, said: str) -> Response:
        scheduler.metrics.count("refused")
        return _refusal(status, said)

    async def answer(request: Request, *, chat: bool) -> Response:
        try:
            body = await _body(request)
        except HTTPException as error:
            return refuse(error.status_code, error.detail)
        try:
            asked = await reading.read(body, chat=chat)
        except ValueError as error:
            return refuse(400, " ".join(str(error).split()))
        if asked.model not in (None, name):
            return refuse(404, _no_model(str(asked.model), name))
        form = Answer(name, asked.texts, asked.choices, chat=chat, now=int(time.time()))
        choices = Choices(asked, form, scheduler, chat=chat)
        try:
            scheduler.submit(*asked.texts)
        except Overloaded as error:
            return _refusal(429, str(error), {"Retry-After": str(error.seconds)})
        except Closed as error:
            return refuse(503, str(error))
        except ValueError as error:
            return refuse(400, str(error))
        gone = asyncio.create_task(_leave_when_gone(request, choices))
        if asked.stream:
            return StreamingResponse(choices.stream(gone), media_type="text/event-stream")
        try:
            return JSONResponse(await choices.whole())
        except Failed as error:
            return _refusal(error.status, str(error))
        finally:
            gone.cancel()
            choices.leave()

    def guarded(route: Callable[[Request], Awaitable[Response]]) -> Callable[..., Any]:
        async def guard(request: Request) -> Response:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(key.encode("latin-1"), expected or b"")
            if expected is not None and not (right and scheme.lower() == "bearer"):
                return _refusal(401, "the API key is missing or wrong")
            if hosts is not None and strangers(request, hosts, origins):
                return _refusal(
                    403,
                    "without an API key only localhost is told anything, and no web page: ask by "
                    "that name, or start the server with --api_key_variable, for a page with "
                    "--allowed_origins",
                )
            return await route(request)

        return guard

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = error.detail
        if error.status_code == 404:
            said += f": there are {_PATHS}"
        return _refusal(error.status_code, said, error.headers)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", guarded(metrics)),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(model)),
            Route("/v1/completions", guarded(partial(answer, chat=False)), methods=["POST"]),
            Route("/v1/chat/completions", guarded(partial(answer, chat=True)), methods=["POST"]),
        ],
        middleware=for_pages_of(origins),
        exception_handlers={HTTPException: on_http},
    )


async def _body(request: Request) -> bytes:
    """Raises HTTPException: it is too large, or does not come."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LARGEST:
                raise HTTPException(413, f"a request has at most {_LARGEST} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the body did not come to its end") from None
    return bytes(body)


async def _leave_when_gone(request: Request, choices: Choices) -> None:
    # The body has been read, so that nothing else can come.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    choices.leave()


def _no_model(asked: str, name: str) -> str:
    return f"there is no model {asked!r} here, only {name!r}"


def _refusal(status: int, said: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(refused(status, said), status, headers)
