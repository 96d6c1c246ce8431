"""Steps that are timed and commit nothing.

Shapes: B batch, T tokens, N nodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from medusa_heads.inference.acceptance import SampleThenMatch
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.recurrent import decoding_state
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.cache import RowCache
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree, TreeShape, cartesian_choices

# With the root a multiple of what matrix units take at a time: a 17th row costs as much as a 32nd.
SIZES = (1, 3, 7, 11, 15, 23, 31, 47, 63)
_ROUNDS = 7


class StepSeconds(NamedTuple):
    """Usual seconds of a step: draft, verification, walk."""

    step: float
    drafting: float  # of these, those of the draft


class RandomChain(Drafter):
    """A chain of tokens drawn once: costs what any chain costs, of a mixture of experts too."""

    def __init__(self, num_drafted: int, vocab_size: int) -> None:
        self._shape = TreeShape.from_choices(cartesian_choices([1] * num_drafted))
        self.num_nodes = self._shape.num_nodes
        random = torch.Generator().manual_seed(num_drafted)
        self._tokens_N = torch.randint(vocab_size, (num_drafted,), generator=random, device="cpu")

    def propose(self, state: DecodingState) -> TokenTree:
        """The same chain for every row."""
        roots_B1 = state.roots_B[:, None]
        drafted_BN = self._tokens_N.to(roots_B1.device).expand(len(roots_B1), -1)
        return self._shape.tree(torch.cat([roots_B1, drafted_BN], dim=1))


class StepBench:
    """Rows behind which steps are timed that commit nothing. What lies in the cache is all zero,
    which takes as long to read as a text.

    Args:
        context: tokens in the cache.
        text: a cache that holds this context, to be copied, and the slots that it may come to
            need; by default there is room for just enough.
    """

    def __init__(
        self,
        target: TargetModel,
        context: int,
        batch_size: int,
        text: tuple[RowCache, int] | None = None,
    ) -> None:
        self._target = target
        random = torch.Generator().manual_seed(0)
        here: Any = {"generator": random, "device": "cpu"}  # whatever torch's default device is
        ids_BT = torch.randint(target.vocab_size, (batch_size, context), **here)
        ids_BT = ids_BT.to(target.device)
        hidden_BTD = torch.randn(batch_size, 2, target.width, **here)
        hidden_BTD = hidden_BTD.to(target.device, target.dtype)
        cache = target.new_cache(batch_size, text[1] if text else context + max(SIZES) + 1)
        if text:
            cache.take_over(text[0])
        elif not cache.can_go_back:
            # States are made by a token, and read as long whatever they say.
            target.hidden(ids_BT[:, :1], cache=cache)
        stop = StopCheck(StoppingCriteriaList())
        rows = [Row(i, batch_size, ids_T, stop) for i, ids_T in enumerate(ids_BT)]
        for row, ids in zip(rows, ids_BT.tolist(), strict=True):
            row.tokens.append(ids[-1])  # as if the last token had just been committed
        self._state = decoding_state(rows, cache, [0] * batch_size)
        self._state.lengths = [context] * batch_size
        self._state.hidden_BD = hidden_BTD[:, -1].clone()
        self._state.take_prompt(hidden_BTD)  # as if a step had committed two tokens
        self._state.roots_B = ids_BT[:, -1]
        self._rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)

    def rounds(self, drafters: Mapping[Any, Drafter], limit: float) -> dict[Any, StepSeconds]:
        """Usual seconds of each: all of them in turns, as often as the limit allows."""
        times: dict[Any, list[StepSeconds]] = {name: [] for name in drafters}
        started = time.perf_counter()
        for repeat in range(_ROUNDS + 1):
            if repeat > 1 and time.perf_counter() - started > limit:
                break
            for name, drafter in drafters.items():
                self.time(drafter)  # memory holds what the last one needed
                elapsed = self.time(drafter)
                if repeat:  # the first round warms up
                    times[name].append(elapsed)
        return {name: _usual(each) for name, each in times.items()}

    @torch.inference_mode()
    def time(self, drafter: Drafter) -> StepSeconds:
        state = self._state
        before, lengths = [len(row.tokens) for row in state.rows], state.lengths
        started = self._now()
        tree = drafter.propose(state)
        drafted = self._now()
        logits_BNV = state.verify(self._target, tree)
        self._rule(tree, logits_BNV, state.rows)  # waits for the device
        if tree.num_nodes > 1:
            state.forget()
        else:  # what was not drafted is always kept
            state.keep([[0]] * len(state.rows))
            state.lengths = lengths
        ended = time.perf_counter()
        for row, length in zip(state.rows, before, strict=True):
            del row.tokens[length:]
        return StepSeconds(ended - started, drafted - started)

    @torch.inference_mode()
    def draft(self, drafter: Drafter) -> float:
        started = self._now()
        drafter.propose(self._state)
        return self._now() - started

    def _now(self) -> float:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        return time.perf_counter()


def _usual(times: Sequence[StepSeconds]) -> StepSeconds:
    """The lower quartiles: whatever else runs on a machine only ever adds to a time."""
    quarter = (len(times) - 1) // 4
    steps, drafting = (sorted(each) for each in zip(*times, strict=True))
    return StepSeconds(steps[quarter], drafting[quarter])
