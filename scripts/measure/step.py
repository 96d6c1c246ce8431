"""Where the time of a decoding step goes, beside transformers' own one-token step.

python -m scripts.measure.step --checkpoint runs/demo/heads --tree 12
python -m scripts.measure.step --checkpoint assets/demo-heads --shape 1b
python -m scripts.measure.step --random_target 768x12x12 --tree 15 --draft_vocab_size 8192

Everything is timed in one process, in turns (of the contexts too), `--repeats` times over; a ratio
is the median of the turns' ratios. Every turn's tokens are compared with those of transformers' own
generate(): in fp32 a difference is an error, in bf16 the table says how far they agree. The step is
that of MedusaModel.generate(), continued from a cache of the given length. Plain decoding is a bare
loop over the target's forward with transformers' DynamicCache, and the faster of two ways: without
a mask, and with an explicit one (models choose slower attention kernels for the one or the other).
How a step without its attention grows with the context is shown beside how the target's forward of
a single token does, over the same cache: that much is the target's own.
On a GPU, work queued in one phase may be waited for in a later one: there only sums are exact.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from medusa_heads.cli.flags.environment import told_to_torch

os.environ.update(told_to_torch())

import torch
from rich.table import Table
from transformers import AutoTokenizer, DynamicCache

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.cli.decoding import load_model
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import ModelArguments
from medusa_heads.inference.bench.prompts import held_out_prompts
from medusa_heads.machine.devices import find_device
from medusa_heads.machine.facts import describe_machine
from medusa_heads.settings import flag
from scripts.grown.model import grown_medusa
from scripts.measure.random_target import random_target
from scripts.measure.step_timers import (
    PHASES,
    bare_step,
    generation,
    one_token_beyond_attention,
    plain_step,
    plain_tokens,
    standing_state,
    timed_attention,
)
from scripts.measure.written import write_report


@dataclass
class ProfileArguments:
    """What to profile."""

    checkpoint: str | None = flag(None, "heads checkpoint folder")
    random_target: str | None = flag(
        None, "WIDTHxLAYERSxHEADS[xKV_HEADS] of a random Llama with fresh heads"
    )
    shape: Literal["0.1b", "1b", "7b"] | None = flag(
        None, "the checkpoint and its target grown to this, in memory"
    )
    vocabulary: int = flag(32000, "of the random target, in tokens")
    draft_vocab_size: int | None = flag(None, "tokens that heads of the random target can draft")
    contexts: list[int] = flag(
        [512, 2048, 8192], "tokens in the cache; cut to what the target allows"
    )
    tree: str = flag("15", "as generate() takes it; of one size")
    dtype: str = flag("bfloat16", "of the target")
    device: str | None = flag(None, "such as cuda")
    new_tokens: int = flag(64, "generated in a turn")
    repeats: int = flag(7, "turns; the first warms up")
    output: str = flag("runs/profile_step.json", "the numbers")


@torch.no_grad()
def write(arguments: ProfileArguments) -> None:
    """Profile as the flags say, and write what comes out: a row for each context."""
    machine = describe_machine()  # before our own work adds to the load
    if (arguments.checkpoint is None) == (arguments.random_target is None):
        raise ValueError("give either --checkpoint or --random_target")
    if arguments.shape is not None and arguments.checkpoint is None:
        raise ValueError("a random target is made of any size: give --shape with --checkpoint")
    if arguments.dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"expected dtype float32, bfloat16 or float16, got {arguments.dtype!r}")
    least = (*arguments.contexts, arguments.vocabulary, arguments.repeats - 1)
    if min(*least, arguments.new_tokens - 1) < 1:
        raise ValueError(
            "expected a vocabulary and contexts of at least 1, and at least 2 repeats and tokens"
        )
    if arguments.random_target is None:
        model, tokenizer = checkpoint_model(arguments)
    else:
        model, tokenizer = random_model(arguments), None
    target: Any = model.target.model
    target.generation_config.eos_token_id = None  # an early end would leave few steps to time
    limit = model.target.max_positions
    room = arguments.new_tokens + model.drafter.num_nodes
    contexts = [n if limit is None else min(n, limit - room) for n in arguments.contexts]
    if min(contexts) < 1:
        raise ValueError(f"{room} new tokens and nodes do not fit the target's {limit} positions")
    contexts = sorted(set(contexts))
    if tokenizer is None:
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(model.target.vocab_size, (contexts[-1] + 1,), generator=random).tolist()
    else:
        (ids,) = held_out_prompts(tokenizer, num_prompts=1, prompt_length=contexts[-1] + 1, seed=0)
    places = [Place(model, ids[: context + 1], arguments.new_tokens) for context in contexts]
    for _ in range(arguments.repeats):
        for place in places:
            place.take_turn()
    report = {
        "target": arguments.random_target or model.target.name_or_path,
        "parameters": target.num_parameters(),
        "dtype": str(model.target.dtype).removeprefix("torch."),
        "nodes": model.drafter.num_nodes,
        "tree": model.tree,
        "draft_vocab_size": model.heads.config.draft_vocab_size,
        "machine": machine | {"load_average_after": describe_machine()["load_average"]},
        "contexts": [place.summary(places[0]) for place in places],
    }
    write_report(arguments.output, report, table_of(report))


def checkpoint_model(arguments: ProfileArguments) -> tuple[MedusaModel, Any]:
    """The checkpoint on its target, as they are or grown, and their tokenizer."""
    checkpoint = str(arguments.checkpoint)
    if arguments.shape is None:
        options = ModelArguments(
            checkpoint,
            dtype=arguments.dtype,  # type: ignore[arg-type]
            device=arguments.device,
        )
        return load_model(options, tree=arguments.tree, compile=False)
    dtype = getattr(torch, arguments.dtype)
    device = find_device(arguments.device)
    model, grown = grown_medusa(
        checkpoint, arguments.shape, dtype=dtype, device=device, tree=arguments.tree
    )
    assert grown is not None
    small = grown.small
    tokenizer = AutoTokenizer.from_pretrained(small.name_or_path, revision=small.revision or "main")
    return model, tokenizer


def random_model(arguments: ProfileArguments) -> MedusaModel:
    """A random target of the given size, and fresh heads."""
    target = random_target(
        str(arguments.random_target),
        arguments.vocabulary,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    size = arguments.draft_vocab_size
    draft_tokens = None if size is None else torch.randperm(arguments.vocabulary)[:size]
    config = HeadsConfig(num_heads=4, draft_vocab_size=size)
    heads = MedusaHeads.from_target(target, config, draft_tokens)
    return MedusaModel(target, heads, tree=arguments.tree, compile=False)


class Place:
    """One length of the text before: all ways of decoding behind it, in turns.

    Args:
        model: the target with its heads.
        ids: the text; all but its last token are in the cache.
        new_tokens: to generate in a turn.
    """

    def __init__(self, model: MedusaModel, ids: list[int], new_tokens: int) -> None:
        self.context = len(ids) - 1
        self.turns: list[dict[str, float]] = []
        self._model, self._new_tokens = model, new_tokens
        self._target: Any = model.target.model
        self._ids_1T = torch.tensor([ids], device=model.target.device)
        self._cache = DynamicCache(config=self._target.config)
        given = {model.target.cache_argument: self._cache, "use_cache": True}
        for chunk_1T in self._ids_1T[:, :-1].split(1024, dim=1):
            self._target(chunk_1T, logits_to_keep=1, **given)
        self._mask_11NS = torch.ones(
            1, 1, 1, self.context + 1, dtype=torch.bool, device=self._target.device
        )
        self._state = standing_state(model, self._ids_1T, self._cache)
        self._expected = plain_tokens(model, self._ids_1T, self._cache, new_tokens)

    def take_turn(self) -> None:
        """Time everything once; times in milliseconds a step."""
        turn = self._generate()
        with timed_attention(self._model) as attention:
            slowed = self._generate()
        turn["attention"] = 1e3 * attention["seconds"] / slowed["steps"]
        step = sum(slowed[phase] for phase in PHASES if phase != "rest")
        turn["beyond_attention"] = step - turn["attention"]
        turn["one_token_beyond_attention"] = one_token_beyond_attention(self._model, self._state)
        turn["bare_step"] = bare_step(self._model, self._state)
        token_11 = self._ids_1T[:, -1:]
        turn["plain_no_mask"] = plain_step(self._target, token_11, self._cache, None)
        turn["plain_mask"] = plain_step(self._target, token_11, self._cache, self._mask_11NS)
        self.turns.append(turn)

    def _generate(self) -> dict[str, float]:
        times, tokens = generation(self._model, self._ids_1T, self._cache, self._new_tokens)
        same = [got == plain for got, plain in zip(tokens, self._expected, strict=True)]
        agreed = same.index(False) if False in same else len(same)
        if agreed < len(same) and self._model.target.dtype == torch.float32:
            raise ValueError(f"token {agreed} behind {self.context} is not transformers' own")
        return times | {"agreed": agreed / len(same)}

    def summary(self, shortest: Place) -> dict[str, Any]:
        """Medians over the turns but the first, which warmed up."""
        turns, first = self.turns[1:], shortest.turns[1:]
        middle = {name: median(turn[name] for turn in turns) for name in turns[0]}
        fastest = min(("plain_no_mask", "plain_mask"), key=lambda name: middle[name])

        def ratio(of: Callable[[dict[str, float]], float]) -> float:
            return median(of(turn) for turn in turns)

        return {
            "context": self.context,
            "tokens_per_step": middle.pop("tokens_per_step"),
            "agreed": middle.pop("agreed"),
            "milliseconds": {name: middle[name] for name in middle if name != "steps"},
            "plain_path": fastest,
            "outside_target": ratio(lambda t: 1 - t["target"] / t["step"]),
            "step_over_plain": ratio(lambda t: t["step"] / t[fastest]),
            "speedup": ratio(lambda t: t["tokens_per_step"] * t[fastest] / t["step"]),
            "realised_over_expected": ratio(lambda t: t["bare_step"] / t["step"]),
            **{
                f"{name}_growth": median(
                    t[name] / f[name] for t, f in zip(turns, first, strict=True)
                )
                for name in ("beyond_attention", "one_token_beyond_attention")
            },
        }


def table_of(report: dict[str, Any]) -> Table:
    """A column for each context: where the time goes, and what that means."""
    size = f"{report['parameters'] / 1e6:.0f}M, {report['dtype']}, {report['nodes']} nodes"
    table = Table(title=f"{Path(report['target']).name} ({size}): milliseconds of a step")
    table.add_column("tokens in the cache")
    for row in report["contexts"]:
        table.add_column(str(row["context"]), justify="right")
    times = {
        "step": "step",
        **{f"  {phase}": phase for phase in PHASES},
        "of it attention": "attention",
        "of it all else": "beyond_attention",
        "forward of one token: all else": "one_token_beyond_attention",
        "plain step, no mask": "plain_no_mask",
        "plain step, explicit mask": "plain_mask",
    }
    for label, name in times.items():
        values = [f"{row['milliseconds'][name]:.2f}" for row in report["contexts"]]
        table.add_row(label, *values, end_section=name == "plain_mask")
    ratios = {
        "outside the target's forward": "outside_target",
        "step / faster plain step": "step_over_plain",
        "tokens per step": "tokens_per_step",
        "speed-up": "speedup",
        "tokens/s / (tokens per step / t(n))": "realised_over_expected",
        "all else / that of the first column": "beyond_attention_growth",
        "of one token: the same": "one_token_beyond_attention_growth",
        "tokens until the first unlike plain": "agreed",
    }
    for label, name in ratios.items():
        table.add_row(label, *(f"{row[name]:.3f}" for row in report["contexts"]))
    return table


main = command("scripts.measure.step", write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
