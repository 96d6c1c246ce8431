"""What drafting a tree takes, as a share of the target's forward of one token.

python -m scripts.measure.drafting
python -m scripts.measure.drafting --kinds corrected eagle3 --dtype float32

Random heads of every kind; the time of one thread's own work, whatever else runs. In every round
each draws one tree, so that none finds its weights where it left them; medians of the rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag

KINDS: dict[str, dict[str, Any]] = {
    "independent": {},
    "corrected": {"correction_rank": 128},
    "prefix-corrected": {"prefix_attention": True, "correction_rank": 128},
    "block-corrected": {"kind": "block", "correction_rank": 128},
    "sequential": {"kind": "hydra"},
    "prefix-sequential": {"kind": "hydra", "prefix_attention": True},
    "eagle3": {"kind": "eagle3"},
}
_WARM_UP = 4  # rounds


@dataclass
class Arguments:
    """What to measure."""

    target: str = flag("assets/demo-target", "folder or hub id")
    kinds: list[str] = flag(list(KINDS), f"of {', '.join(KINDS)}")
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

    from medusa_heads import HeadsConfig, MedusaModel, TargetModel, new_heads
    from medusa_heads.cache_names import cache_of
    from medusa_heads.trees.statistics import HeadStatistics
    from medusa_heads.trees.tree import TokenTree
    from scripts.measure.step_timers import standing_state

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    target = TargetModel.from_pretrained(arguments.target, dtype=dtype)
    ids_1T = torch.randint(target.vocab_size, (1, arguments.context))
    ranks_SK = torch.randint(6, (400, arguments.num_heads))
    statistics = HeadStatistics.from_ranks(ranks_SK)

    def plain(state: Any) -> None:
        root = TokenTree.root_only(state.roots_B)
        int(target.verify(root, state.cache, state.tree_mask(root))[0, 0].argmax())

    def draft(model: MedusaModel, state: Any, lengths: dict[Any, list[int]]) -> None:
        for memory, known in lengths.items():
            memory.lengths = list(known)  # as if the same text were read on from again
        model.drafter.propose(state)

    size = arguments.draft_vocab_size
    tokens_C = None if size is None else torch.randperm(target.vocab_size)[:size]
    shape: dict[str, Any] = {"num_heads": arguments.num_heads, "draft_vocab_size": size}
    runs: dict[tuple[str, str], Callable[[], None]] = {}
    with torch.no_grad():
        for kind in arguments.kinds:
            config = HeadsConfig(**shape, **KINDS[kind])
            heads = new_heads(target, config, tokens_C).to(dtype).eval()
            for parameter in heads.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
            for tree in arguments.trees:
                model = MedusaModel(target, heads, statistics=statistics, tree=tree)
                cache: Any = cache_of(target.model(ids_1T[:, :-1], use_cache=True))
                state = standing_state(model, ids_1T, cache)
                lengths = {memory: list(memory.lengths) for memory in state.memories.values()}
                runs[kind, tree] = partial(draft, model, state, lengths)
        runs["the target, one token", ""] = partial(plain, state)
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        for number in range(_WARM_UP + arguments.rounds):
            for key, run in runs.items():
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


main = command("scripts.measure.drafting", measure, __doc__)

if __name__ == "__main__":
    sys.exit(main())
