"""What drafting a tree takes, as a share of the target's forward of one token.

python -m scripts.measure.drafting
python -m scripts.measure.drafting --kinds corrected eagle3 --dtype float32
python -m scripts.measure.drafting --heads runs/recipes/heads/*

Random heads of every kind behind a random text, or those of checkpoints behind pieces of this
program; the time of one thread's own work, whatever else runs. In every round each drafts one tree,
so that none finds its weights where it left them; medians of the rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag

if TYPE_CHECKING:
    from torch import Tensor

    from medusa_heads import TargetModel
    from medusa_heads.heads import DraftHeads
    from medusa_heads.trees.statistics import HeadStatistics

KINDS: dict[str, dict[str, Any]] = {
    "independent": {},
    "corrected": {"correction_rank": 128},
    "prefix-corrected": {"prefix_attention": True, "correction_rank": 128},
    "block-corrected": {"kind": "block", "correction_rank": 128},
    "sequential": {"kind": "hydra"},
    "prefix-sequential": {"kind": "hydra", "prefix_attention": True},
    "induction": {"linear_shortcut": True, "induction": True},
    "induction-corrected": {"linear_shortcut": True, "induction": True, "correction_rank": 128},
    "induction-sequential": {"kind": "hydra", "induction": True},
    "eagle3": {"kind": "eagle3"},
}
_WARM_UP = 4  # rounds
_TEXTS = 12  # at most, of this program


@dataclass
class Arguments:
    """What to measure."""

    target: str = flag("assets/demo-target", "folder or hub id")
    kinds: list[str] = flag(list(KINDS), f"of {', '.join(KINDS)}")
    heads: list[str] = flag([], "checkpoints of heads, instead of random ones")
    trees: list[str] = flag(["static:31", "dynamic:31"], "trees to draft")
    num_heads: int = flag(5, "heads of each kind")
    draft_vocab_size: int | None = flag(None, "tokens that heads can draft, drawn; by default all")
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "of target and heads")
    context: int = flag(256, "tokens of the text before")
    rounds: int = flag(60, "of which the median is taken")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.kinds) - set(KINDS)):
            raise ValueError(f"kinds are {', '.join(KINDS)}, got {unknown}")


def measure(arguments: Arguments) -> None:
    """Print a table."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from medusa_heads import MedusaModel, TargetModel
    from medusa_heads.cache_names import cache_of
    from medusa_heads.trees.statistics import HeadStatistics
    from medusa_heads.trees.tree import TokenTree
    from scripts.measure.step_timers import standing_state

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    target = TargetModel.from_pretrained(arguments.target, dtype=dtype)
    texts = _texts(arguments, target)
    ranks_SK = torch.randint(6, (400, arguments.num_heads))
    statistics = HeadStatistics.from_ranks(ranks_SK)

    def plain(state: Any) -> None:
        root = TokenTree.root_only(state.roots_B)
        int(target.verify(root, state.cache, state.tree_mask(root))[0, 0].argmax())

    def draft(model: MedusaModel, state: Any, lengths: dict[Any, list[int]]) -> None:
        for memory, known in lengths.items():
            memory.lengths = list(known)  # as if the same text were read on from again
        model.drafter.propose(state)

    runs: dict[tuple[str, str], list[Callable[[], None]]] = {}
    with torch.no_grad():
        for kind, heads, known in _heads(arguments, target):
            for tree in arguments.trees:
                model = MedusaModel(target, heads, statistics=known or statistics, tree=tree)
                runs[kind, tree] = []
                for ids_1T in texts:
                    cache: Any = cache_of(target.model(ids_1T[:, :-1], use_cache=True))
                    state = standing_state(model, ids_1T, cache)
                    lengths = {memory: list(memory.lengths) for memory in state.memories.values()}
                    runs[kind, tree].append(partial(draft, model, state, lengths))
        runs["the target, one token", ""] = [partial(plain, state)]
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        for number in range(_WARM_UP + arguments.rounds):
            for key, each in runs.items():
                run = each[number % len(each)]
                started = time.process_time()
                run()
                if number >= _WARM_UP:
                    seconds[key].append(time.process_time() - started)
    medians = {key: 1e3 * median(taken) for key, taken in seconds.items()}
    table = Table(title=f"Drafting, {arguments.dtype}, one thread, a text of {arguments.context}")
    for column in ("heads", "tree", "milliseconds", "share of the target's"):
        table.add_column(column, justify="left" if column in ("heads", "tree") else "right")
    whole = medians["the target, one token", ""]
    for (kind, tree), taken in medians.items():
        table.add_row(kind, tree, f"{taken:.2f}", f"{taken / whole:.2f}")
    Console().print(table)


def _texts(arguments: Arguments, target: TargetModel) -> list[Tensor]:
    """What is drafted behind, each of shape (1, context): pieces of this program where heads know
    what follows, else random tokens."""
    import torch
    from transformers import AutoTokenizer

    if not arguments.heads:
        return [torch.randint(target.vocab_size, (1, arguments.context))]
    text = Path(__file__).read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(arguments.target)(text)["input_ids"]
    beginnings = range(0, max(len(ids) - arguments.context, 1), max(len(ids) // _TEXTS, 1))
    return [torch.tensor([ids[first : first + arguments.context]]) for first in beginnings]


def _heads(
    arguments: Arguments, target: TargetModel
) -> Iterator[tuple[str, DraftHeads, HeadStatistics | None]]:
    """What is drafted with: its name, and what was measured of it, if that is known."""
    import torch

    from medusa_heads import HeadsConfig, new_heads
    from medusa_heads.checkpoint.checkpoint import load_heads

    for folder in arguments.heads:
        loaded = load_heads(folder, target)
        yield Path(folder).name, loaded.heads, loaded.statistics
    size = arguments.draft_vocab_size
    tokens_C = None if size is None else torch.randperm(target.vocab_size)[:size]
    shape: dict[str, Any] = {"num_heads": arguments.num_heads, "draft_vocab_size": size}
    for kind in () if arguments.heads else arguments.kinds:
        heads = (
            new_heads(target, HeadsConfig(**shape, **KINDS[kind]), tokens_C).to(target.dtype).eval()
        )
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        yield kind, heads, None


main = command("scripts.measure.drafting", measure, __doc__)

if __name__ == "__main__":
    sys.exit(main())
