"""A small OpenAI-compatible server on a real socket, with a real model behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import torch

from tests.inference.reference import reference


class CompletionServer(ThreadingHTTPServer):
    """Answers /v1/completions and /v1/chat/completions with the model's own greedy text, which it
    writes once.

    Attributes:
        model, tokenizer: who answers.
        takes_ids: whether prompts of token ids are accepted.
        sends_ids: whether `return_token_ids` is honoured.
        key: the API key it wants, if any.
        failures: status codes to answer with before anything else, in order.
        dies_after: requests after which all others fail.
        longest: tokens of the longest prompt that is not refused.
        unknown: a field of requests that is refused, as strict servers do.
        spoil: what to do to each text before it is sent.
        requests: bodies of all requests.
        authorizations: their headers.
    """

    daemon_threads = True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.tokenizer = model, tokenizer
        self.takes_ids, self.sends_ids = True, False
        self.key: str | None = None
        self.failures: list[int] = []
        self.dies_after: int | None = None
        self.longest: int | None = None
        self.unknown: str | None = None
        self.spoil = lambda text: text
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.lock = Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def note(self, request: dict[str, Any]) -> None:
        """Remember a request."""
        self.requests.append(request)

    def complete(self, prompt: list[int], request: dict[str, Any]) -> tuple[list[int], str]:
        """New tokens, and why they ended."""
        input_ids = torch.tensor([prompt])
        with self.lock:
            output = reference(
                self.model,
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=request["max_tokens"],
                do_sample=False,
                pad_token_id=0,
            )
        tokens = output[0, len(prompt) :].tolist()
        return tokens, "stop" if tokens[
            -1
        ] == self.model.generation_config.eos_token_id else "length"


class _Handler(BaseHTTPRequestHandler):
    server: CompletionServer
    protocol_version = "HTTP/1.1"  # connections are kept
    wbufsize, disable_nagle_algorithm = -1, True  # a reply is one packet

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.note(request)
            server.authorizations.append(self.headers["Authorization"])
            failure = server.failures.pop(0) if server.failures else None
            if server.dies_after is not None and len(server.requests) > server.dies_after:
                failure = 500
        if failure is not None:
            return self._send(failure, {"error": {"message": "not now"}})
        if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
            return self._send(401, {"error": {"message": "who are you?"}})
        if server.unknown in request:
            return self._send(422, {"detail": f"extra fields not permitted: {server.unknown}"})
        is_chat = self.path.endswith("/chat/completions")
        if is_chat:
            prompt = server.tokenizer.apply_chat_template(
                request["messages"],
                tools=request.get("tools"),
                add_generation_prompt=True,
                return_dict=False,
                **request.get("chat_template_kwargs", {}),
            )
        elif isinstance(request["prompt"], list) and server.takes_ids:
            prompt = request["prompt"]
        else:
            return self._send(422, {"error": {"message": "prompt must be a string"}})
        if server.longest is not None and len(prompt) > server.longest:
            return self._send(400, {"error": {"message": "too long"}})
        tokens, reason = server.complete(prompt, request)
        ended = reason == "stop"
        skip = request.get("skip_special_tokens", True)  # vLLM's default
        said = tokens[:-1] if ended else tokens
        text = server.spoil(server.tokenizer.decode(said, skip_special_tokens=skip))
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if server.sends_ids and request.get("return_token_ids"):
            choice["token_ids"] = tokens
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        return self._send(200, {"choices": [choice], "usage": usage})

    def _send(self, status: int, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(model: Any, tokenizer: Any) -> Iterator[CompletionServer]:
    """A server in a thread of its own, for as long as the block."""
    server = CompletionServer(model, tokenizer)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
