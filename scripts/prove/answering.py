"""A server of completions whose texts cost little, in a process of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scripts.prove.forks import make_forks_safe
from tests.inference.regeneration.completion_server import CompletionServer

TARGET = Path(__file__).resolve().parents[2] / "assets" / "demo-target"
WORDS = ("the", "tree", "of", "drafts", "is", "read", "in", "one", "pass", "and", "kept")


class AnsweringServer(CompletionServer):
    """Makes up most texts, and counts requests and real answers in memory that the parent sees."""

    def __init__(self, model: Any, tokenizer: Any, real_every: int, counts: Any) -> None:
        super().__init__(model, tokenizer)
        self.real_every, self.counts = real_every, counts

    def note(self, request: dict[str, Any]) -> None:
        """Count a request."""
        self.counts[0] += 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is none."""

    def complete(self, prompt: list[int], request: dict[str, Any]) -> tuple[list[int], str]:
        """The target's own tokens, or words drawn by everything that the request says."""
        if sum(prompt) % self.real_every == 0:
            with self.lock:
                self.counts[1] += 1
            return super().complete(prompt, request)
        rng = random.Random(str([prompt, request["seed"], request["temperature"]]))
        words = rng.choices(WORDS, k=rng.randint(1, max(1, request["max_tokens"] // 4)))
        tokens = self.tokenizer("".join(f" {word}" for word in words))["input_ids"]
        ended = rng.random() < 0.5
        return [*tokens, *[self.tokenizer.eos_token_id] * ended], "stop" if ended else "length"


@dataclass
class Server:
    """Where it is, and what it has done so far."""

    url: str
    counts: Any

    def has_served(self, count: int | None) -> bool:
        """Whether so many requests were answered, those asked again among them."""
        return count is not None and self.counts[0] >= count


@contextmanager
def answering(real_every: int) -> Iterator[Server]:
    """The server, in a process of its own for as long as the block."""
    make_forks_safe()
    context = get_context("fork")
    counts, ready = context.Array("q", 2), context.Queue()

    def serve() -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(str(TARGET), dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(str(TARGET))
        server = AnsweringServer(model, tokenizer, real_every, counts)
        ready.put(server.url)
        server.serve_forever()

    process = context.Process(target=serve, daemon=True)
    process.start()
    try:
        yield Server(ready.get(timeout=120), counts)
    finally:
        process.kill()
        process.join()
