"""How often a decoding step makes the host wait for the device, and builds tensors on the host; or
how many graphs whole steps come to as texts grow, or how long the host works on each of them.

python -m scripts.measure.host_waits --checkpoint assets/demo-heads
python -m scripts.measure.host_waits --checkpoint runs/demo/heads --trees 15 --whole_steps
python -m scripts.measure.host_waits --checkpoint assets/demo-heads --trees 15 --graphs aot_eager \
    --new_tokens 2000
python -m scripts.measure.host_waits --checkpoint assets/demo-heads --seconds --new_tokens 200

Counted without a GPU, as one would have it: on a CPU the same calls are made and cost nothing. What
a step of the loop asks is what a longer text asks more than one of a single step. Branches of the
code that are for CPUs alone are counted: greedy text is walked level by level there, on a GPU at
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_heads.cli.decoding import load_model
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import ModelArguments
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.machine.watched import UNSEEN, asks
from medusa_heads.settings import flag
from scripts.measure.host_time import Timed, seconds_of_step

# A tensor is made of the host's numbers, or see Asks.
Kind = Literal["read", "shape", "built", "copied"]

_LIFT = torch.ops.aten.lift_fresh


class _Dispatched(TorchDispatchMode):
    def __init__(self, counts: Counter[Kind]) -> None:
        super().__init__()
        self._counts = counts
        self.written = False  # a number is written into a tensor: a kernel's argument

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (kind := asks(operator, args, kwargs)) is not None:
            self._counts[kind] += 1
        elif operator.overloadpacket is _LIFT and not (self.written and args[0].ndim == 0):
            self._counts["built"] += 1
        return operator(*args, **kwargs)


class _Called(TorchFunctionMode):
    def __init__(self, counts: Counter[Kind], dispatched: _Dispatched) -> None:
        super().__init__()
        self._counts, self._dispatched = counts, dispatched

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in UNSEEN:
            self._counts["read"] += 1
        writes = function is Tensor.__setitem__ and isinstance(args[2], int | float)
        before, self._dispatched.written = self._dispatched.written, writes
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._dispatched.written = before


@contextmanager
def counted() -> Iterator[Counter[Kind]]:
    """Within the block, every wait for the device is counted, and every tensor made of lists or
    numbers of the host."""
    counts: Counter[Kind] = Counter()
    with _Dispatched(counts) as dispatched, _Called(counts, dispatched):
        yield counts


def prompts(model: AssistedModel, batch: int) -> dict[str, Any]:
    """Of unequal lengths, for texts that no token ends."""
    ids_BT = torch.randint(
        5, model.target.vocab_size, (batch, 24), generator=torch.Generator().manual_seed(0)
    )
    mask_BT = torch.arange(24) >= torch.arange(batch)[:, None] % 7
    device = model.target.device
    given: dict[str, Any] = {
        "inputs": ids_BT.to(device),
        "attention_mask": mask_BT.long().to(device),
    }
    return given | {"pad_token_id": 0, "eos_token_id": None}


def per_step(
    model: AssistedModel, batch: int, new_tokens: int, **options: Any
) -> dict[Kind, float]:
    """What a step of the loop asks on average, of `batch` prompts of unequal lengths."""
    given, seen = prompts(model, batch) | options, []
    for length in (2, 2, new_tokens):  # the first text makes what is kept
        torch.manual_seed(0)
        with counted() as counts:
            model.generate(**given, max_new_tokens=length)
        seen.append((counts, model.last_stats.forwards))
    _, (short, before), (long, forwards) = seen
    return {kind: (long[kind] - short[kind]) / (forwards - before) for kind in _KINDS}


class Graphs(NamedTuple):
    """What became of the steps of a text: whether each was taken whole, how many graphs they are,
    and how often one broke."""

    whole: bool
    graphs: int
    breaks: int


def graphs_of(model: AssistedModel, batch: int, new_tokens: int, **options: Any) -> Graphs:
    """Of `batch` texts of unequal lengths, by nothing that was compiled before."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.manual_seed(0)
    model.generate(**prompts(model, batch), **options, max_new_tokens=new_tokens)
    breaks = sum((counters["graph_break"] + counters["unimplemented"]).values())
    whole = "step" in model.last_stats.seconds
    return Graphs(whole, counters["stats"]["unique_graphs"], breaks)


_KINDS: tuple[Kind, ...] = ("read", "shape", "built", "copied")


@dataclass
class Arguments:
    """What to count."""

    trees: list[str] = flag(["static:15", "dynamic:15", "auto"], "to draft")
    batch_sizes: list[int] = flag([1, 8], "of prompts")
    new_tokens: int = flag(48, "of each text")
    whole_steps: bool = flag(False, "as compile='steps' takes them")
    graphs: str | None = flag(None, "count graphs of whole steps that this backend compiles")
    seconds: bool = flag(False, "time the host in whole steps, besides their graphs")


def show(arguments: Arguments, which: ModelArguments) -> None:
    """Count, and print a table."""
    graphs, timed = arguments.graphs, Timed() if arguments.seconds else None
    whole_steps = arguments.whole_steps or graphs is not None or timed is not None
    backend = timed or graphs or "eager"
    compiling = {"compile": "steps", "compile_backend": backend} if whole_steps else {}
    model, _ = load_model(which, **compiling)
    target: Any = model.target

    def cells(batch: int, options: dict[str, Any]) -> Sequence[Any]:
        if timed is not None:
            given = prompts(model, batch) | options
            return [f"{1e3 * seconds_of_step(model, timed, arguments.new_tokens, **given):.2f}"]
        if graphs is not None:
            return graphs_of(model, batch, arguments.new_tokens, **options)
        with target.uncompiled() if whole_steps else nullcontext():
            waits = per_step(model, batch, arguments.new_tokens, **options)
        return [f"{waits[kind]:.1f}" for kind in _KINDS]

    columns = ["ms a step"] if timed else _KINDS if graphs is None else Graphs._fields
    table = Table("tree", "text", "rows", *columns)
    for tree in arguments.trees:
        model.use_tree(tree)
        for text, options in (
            ("greedy", {"do_sample": False}),
            ("sampled", {"do_sample": True, "temperature": 0.7, "top_k": 50}),
        ):
            for batch in arguments.batch_sizes:
                table.add_row(tree, text, str(batch), *map(str, cells(batch, options)))
    Console().print(table)


main = command("scripts.measure.host_waits", show, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
