"""Proof that a server's texts are those of `generate()`, whoever else is served or leaves, and that
nothing of a text stays behind.

python -m scripts.prove.serving --requests 1000 --clients 64

Clients ask for texts of mixed length: greedy ones, and ones drawn at two temperatures with seeds of
their own; whole, or as streams. Every fourth client leaves before its text is there: at once, or
behind a random number of pieces, by closing its connection. A request that is refused with 429 is
made again. There are fewer rows and places in the queue than clients, so that some are.

The target is a random Llama of two layers, and one that differs from it a little drafts trees.
A finished text must be what `generate()` writes of it alone; one that was left must begin so. After
the last one the server must hold no row and no byte of cache, and after its end no thread, row or
cache may be left in memory. The negative control, in which a row that joins brings another text's
cache along, must be found.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from medusa_heads.cli.flags.arguments import command
from medusa_heads.inference.endpoint.server import Server
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.inference.models.drafted import DraftedModel
from medusa_heads.settings import flag
from medusa_heads.target.cache import RowCache
from medusa_heads.target.stacks import Stacks
from scripts.prove.asking.clients import Client, Job, Outcome
from scripts.prove.tiny_models import random_weights
from tests.inference.speaking import make_tokenizer

_SETTINGS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.2, "top_p": 0.9},
)
_LONGEST = 60  # tokens of a text


@dataclass
class ServingArguments:
    """How much is asked, and by how many at a time."""

    requests: int = flag(1000, "Texts that are asked for.")
    clients: int = flag(64, "Clients that ask at the same time.")
    max_rows: int = flag(16, "Texts that are written at a time.")
    queue: int = flag(32, "Requests that may wait.")
    kinds: int = flag(200, "Different prompts with their settings.")
    seed: int = flag(0, "Of prompts, lengths and who leaves when.")


def make_jobs(model: AssistedModel, tokenizer: Any, count: int, kinds: int, seed: int) -> list[Job]:
    """What is asked for. Texts are the beginnings of longer ones, so that many jobs share what
    `generate()` has written once."""
    rng, letters = random.Random(seed), "abcdefghijklmnopqrstuvwxyz"
    made, written = [], [_written(model, tokenizer, rng, letters) for _ in range(kinds)]
    for place in range(count):
        body, ids = written[place % kinds]
        most = rng.randint(1, _LONGEST)
        expected = tokenizer.decode(ids[:most], skip_special_tokens=True)
        leaves = rng.randint(0, 8) if place % 4 == 3 else None
        body = body | {"max_tokens": most, "stream": leaves is not None or rng.random() < 0.5}
        made.append(Job(body, leaves, expected))
    return made


def _written(
    model: AssistedModel, tokenizer: Any, rng: random.Random, letters: str
) -> tuple[dict[str, Any], list[int]]:
    prompt = "".join(rng.choices(letters, k=rng.randint(1, 80)))
    asked = dict(rng.choice(_SETTINGS))
    seed = rng.randrange(1 << 40)
    sampled = asked["temperature"] > 0
    options = {**asked, "do_sample": True} if sampled else {"do_sample": False}
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    text_1T: Any = model.generate(**inputs, max_new_tokens=_LONGEST, **options)
    ids = text_1T[0, inputs["input_ids"].shape[1] :].tolist()
    return {"prompt": prompt, "seed": seed, **asked}, ids


def serve(
    model: AssistedModel,
    tokenizer: Any,
    jobs: Sequence[Job],
    *,
    clients: int,
    max_rows: int,
    queue: int,
) -> Outcome:
    """Have a server answer all jobs, and look for what stayed behind."""
    outcome, taking, waiting = Outcome(), threading.Lock(), iter(jobs)
    before = set(threading.enumerate())
    kept = _in_memory()  # of whoever decoded in this process before
    started = time.perf_counter()
    with Server(model, tokenizer, port=0, max_rows=max_rows, queue=queue) as server:
        asking = [Client(server.url, waiting, taking, outcome) for _ in range(clients)]
        for client in asking:
            client.start()
        for client in asking:
            client.join()
        outcome.seconds = time.perf_counter() - started
        scheduler = server.scheduler
        while not scheduler.is_idle():  # those whose clients have just left
            time.sleep(0.01)
        outcome.metrics = scheduler.metrics.text()
    outcome.tokens = int(_metric(outcome.metrics, "generated_tokens_total"))
    if _metric(outcome.metrics, "cache_bytes") or _metric(outcome.metrics, "requests_running"):
        outcome.faults.append("rows or cache are left")
    ended = {
        name: int(_metric(outcome.metrics, f'requests_total{{outcome="{name}"}}'))
        for name in ("finished", "cancelled", "failed", "refused")
    }
    # Who leaves late may leave behind a finished text; who leaves at once may never have asked.
    if ended["failed"] or ended["finished"] < outcome.ended["finished"]:
        outcome.faults.append(f"the server counts {ended}")
    if running := set(threading.enumerate()) - before:
        outcome.faults.append(f"threads are left: {sorted(thread.name for thread in running)}")
    del server, scheduler
    if left := len(_in_memory().keys() - kept):
        outcome.faults.append(f"{left} rows or caches are left in memory")
    return outcome


def _in_memory() -> dict[int, Row | RowCache]:
    gc.collect()
    # Not isinstance: it would ask a lazy object for its class, and so load what that stands for.
    found = (each for each in gc.get_objects() if issubclass(type(each), (Row, RowCache)))
    return {id(each): each for each in found}


def _metric(text: str, name: str) -> float:
    prefix = f"medusa_heads_{name} "
    return next(
        float(line.removeprefix(prefix)) for line in text.splitlines() if line.startswith(prefix)
    )


@contextmanager
def joining_wrongly() -> Iterator[None]:
    """The negative control: within the block, rows join with a cache that is not theirs."""
    join = Stacks.join

    def join_wrongly(own: Stacks, other: Stacks, *args: Any) -> None:
        other.stacks = [stack.roll(1, dims=3) for stack in other.stacks]
        join(own, other, *args)

    with mock.patch.object(Stacks, "join", join_wrongly):
        yield


def prove(arguments: ServingArguments) -> int:
    """Returns 1 where a text was another, something stayed, or the control passed."""
    model, tokenizer = speaker()
    jobs = make_jobs(model, tokenizer, arguments.requests, arguments.kinds, arguments.seed)
    limits = {name: getattr(arguments, name) for name in ("clients", "max_rows", "queue")}
    outcome = serve(model, tokenizer, jobs, **limits)
    for line in outcome.metrics.splitlines():
        if not line.startswith("#"):
            print(line)
    print(
        f"{outcome.ended['finished']} texts finished, {outcome.ended['left']} left, "
        f"{outcome.ended['refused']} requests refused; {outcome.tokens} tokens in "
        f"{outcome.seconds:.0f} s"
    )
    for job in outcome.wrong[:5]:
        print(f"another text: {job.body}")
    for fault in outcome.faults[:5]:
        print(f"fault: {fault}")
    with joining_wrongly():
        control = serve(model, tokenizer, jobs[:100], **limits)
    print(f"wrong texts: {len(outcome.wrong)}; of the control {len(control.wrong)}")
    passed = not outcome.wrong and not outcome.faults and bool(control.wrong)
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


def speaker() -> tuple[AssistedModel, Any]:
    """A random target with a tokenizer of single characters, and a draft model that knows most of
    it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    target = random_weights(LlamaForCausalLM(config), (0.15, 0.15))
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))
    return DraftedModel(target, draft, tree="dynamic:8"), tokenizer


main = command("scripts.prove.serving", prove, __doc__)

if __name__ == "__main__":
    sys.exit(main())
