"""Timers for step.py: one step of tree decoding, and transformers' own, in milliseconds.

Shapes: B batch, T tokens, N tree nodes, S cache slots, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from medusa_heads import MedusaModel
from medusa_heads.cache_names import cache_argument
from medusa_heads.inference.acceptance import make_rule
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.machine.devices import wait_for
from medusa_heads.target.graphs.captured import as_it_is
from medusa_heads.trees.tree import TokenTree

PHASES = ("target", "draft", "walk", "cache", "rest")
STEPS = 8  # whose median a single timing is


def generation(
    model: MedusaModel, ids_1T: torch.Tensor, cache: DynamicCache, new_tokens: int
) -> tuple[dict[str, float], list[int]]:
    """One call of generate() behind a cache, which stays as it was: milliseconds a step by phase,
    its prefill left out, `graph` being steps that are one graph; and what it wrote."""
    own = as_it_is(model.target).new_cache(1)  # one that is written to where it lies
    own.take_over(cache)
    given: Any = {model.target.cache_argument: own}
    wait_for(model.target.device)
    started = time.perf_counter()
    sequences: Any = model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=new_tokens,
        do_sample=False,
        **given,
    )
    wait_for(model.target.device)
    stats = model.last_stats
    steps = stats.steps - 1
    seconds = time.perf_counter() - started - stats.seconds["prefill"]
    phases = ("graph" if name == "step" else name for name in stats.seconds)
    spent = dict(zip(phases, (1e3 * each / steps for each in stats.seconds.values()), strict=True))
    del spent["prefill"]
    step = 1e3 * seconds / steps
    spent["rest"] = step - sum(spent.values())
    times = spent | {
        "step": step,
        "steps": float(steps),
        "tokens_per_step": (stats.tokens - 1) / steps,
    }
    return times, sequences[0, ids_1T.shape[1] :].tolist()


def plain_tokens(
    model: MedusaModel, ids_1T: torch.Tensor, cache: DynamicCache, new_tokens: int
) -> list[int]:
    """What transformers' own generate() writes; the cache stays as it was."""
    target: Any = model.target.model
    length = cache.get_seq_length()
    sequences = target.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=new_tokens,
        do_sample=False,
        **{model.target.cache_argument: cache},
    )
    cache.crop(length - cache.get_seq_length())
    tokens: list[int] = sequences[0, ids_1T.shape[1] :].tolist()
    return tokens


def standing_state(model: MedusaModel, ids_1T: torch.Tensor, cache: DynamicCache) -> DecodingState:
    """Decoding as it stands behind a text, to step from there again and again."""
    target = model.target
    own = target.new_cache(1, ids_1T.shape[1] + model.drafter.num_nodes)
    own.take_over(cache)
    hidden_1TD = target.hidden(ids_1T[:, :-1])
    row = Row(0, 1, ids_1T[0], StopCheck(StoppingCriteriaList()))
    state = DecodingState([row], own, [0])
    state.hidden_BD, state.roots_B = hidden_1TD[:, -1].clone(), ids_1T[:, -1]
    state.lengths = [ids_1T.shape[1] - 1]
    state.take_prompt(hidden_1TD)
    model.drafter.propose(state)  # one that remembers the text reads it here
    state.take_prompt(hidden_1TD[:, -2:])  # from now on as if each step had committed two tokens
    return state


def bare_step(model: MedusaModel, state: DecodingState) -> float:
    """t(n), as trees are sized by: draft, verification and walk behind a context that stays."""
    rule = make_rule("lossless", LogitsProcessorList(), False)
    times = []
    for _ in range(STEPS):
        wait_for(model.target.device)
        started = time.perf_counter()
        tree = model.drafter.propose(state)
        logits_BNV = model.target.verify(tree, state.cache, state.tree_mask(tree))
        rule(tree, logits_BNV, state.rows)
        times.append(time.perf_counter() - started)
    return 1e3 * median(times)


def one_token_beyond_attention(model: MedusaModel, state: DecodingState) -> float:
    """The target's forward of a single token, over the same cache, without its attention."""
    tree = TokenTree.root_only(state.roots_B)
    times = []
    with timed_attention(model, shortest=1) as attention:
        for _ in range(STEPS):
            wait_for(model.target.device)
            before, started = attention["seconds"], time.perf_counter()
            logits_BNV = model.target.verify(tree, state.cache, state.tree_mask(tree))
            int(logits_BNV[0, 0].argmax())  # waits for the device
            spent = time.perf_counter() - started
            times.append(spent - (attention["seconds"] - before))
    return 1e3 * median(times)


def plain_step(
    target: Any, token_11: torch.Tensor, cache: DynamicCache, mask_11NS: torch.Tensor | None
) -> float:
    """A one-token step of the target, its argmax read; the cache stays as it was."""
    times, given = [], {cache_argument(target.forward): cache}
    for _ in range(STEPS):
        started = time.perf_counter()
        logits = target(token_11, attention_mask=mask_11NS, use_cache=True, **given).logits
        int(logits[0, -1].argmax())  # waits for the device
        times.append(time.perf_counter() - started)
        cache.crop(-1)
    return 1e3 * median(times)


@contextmanager
def timed_attention(model: MedusaModel, shortest: int = 2) -> Iterator[dict[str, float]]:
    """Within the block, seconds inside the attention function of forwards of several tokens, or
    of all that have at least `shortest`."""
    name = model.target.config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(f"only sdpa attention can be timed apart, and the target has {name!r}")
    attend: Any = ALL_ATTENTION_FUNCTIONS[name]
    spent = {"seconds": 0.0}

    def timed(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wait_for(model.target.device)
        started = time.perf_counter()
        result = attend(module, query, *args, **kwargs)
        wait_for(model.target.device)
        if query.shape[2] >= shortest:  # behind a cache, also the prefill is one token
            spent["seconds"] += time.perf_counter() - started
        return result

    ALL_ATTENTION_FUNCTIONS[name] = timed
    try:
        yield spent
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = attend
