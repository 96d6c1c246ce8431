"""Drafts of several sources in one tree, of the size that pays at this very step.

Shapes: B active rows, N tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

import math
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock, most_again
from medusa_heads.inference.adapt.lessons import Lessons
from medusa_heads.inference.adapt.situation import BOUNDS, FURTHER, Draft, Situation, Step, Trial
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.forest import grown
from medusa_heads.inference.drafters.growing import Agreement, Growing, Proposal, Source
from medusa_heads.inference.drafters.text import TextSource
from medusa_heads.inference.engine.state import DecodingState, Drawing
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.trees.prefix_tree import to_token_tree
from medusa_heads.trees.tree import TokenTree

_LONG, _IN_A_ROW = 6, 2  # steps of rest, and those that a source is then asked for besides
_USUAL = 0.03  # of a plain step: what a source takes that was not timed before


class BlendedDrafter(Drafter):
    """What the text itself suggests, and what other sources offer.

    Sources are asked one after the other, the cheapest first, and each only where it has gained
    more than it costs: tokens against seconds, where as much was known without it. Of all that is
    offered those nodes are verified that are likeliest to be accepted, and as many as pay: a long
    chain where the text repeats itself, a bushy tree where it does not, none where drafts have been
    wrong of late.

    Args:
        clock: what steps take here.
        sizes: numbers of drafted nodes to choose from; 0 is plain decoding.
        text, sources: what the text itself suggests, and whatever else may be asked.
        always: whether the text and all sources are asked at every step.
        chain_only: never more than one token behind another.
        padded: every tree has exactly one of the sizes, spare nodes included: each is a graph of
            its own where the target is compiled.
        lessons: where this begins with what was learnt before, and keeps what it learns; None for
            nowhere.
    """

    def __init__(
        self,
        clock: Clock,
        sizes: Sequence[int],
        *,
        text: TextSource | None = None,
        sources: Sequence[Source] = (),
        always: bool = False,
        chain_only: bool = False,
        padded: bool = False,
        lessons: Lessons | None = None,
    ) -> None:
        self._clock, self._sizes = clock, list(sizes)
        self._text, self._sources = text, list(sources)
        self._always, self._chain_only, self.padded = always, chain_only, padded
        # What is learnt of greedy text says little of sampled text.
        self._situations: dict[tuple[Drawing, int], Situation] = {}
        # Held by the text's state alone: rows, streamers and scores are not to outlive their text.
        self._last: Callable[[], Step | None] = lambda: None
        self._again = [0] * len(self._sources)  # steps for which each is asked whatever it gains
        # Only sources that know the same noise are far from independent.
        self._agreement: dict[Drawing, Agreement] = {"keyed": Agreement()}
        self.num_nodes = max(self._sizes) + 1
        self.reads_prompt = any(source.reads_prompt for source in self._sources)
        self._lessons = lessons
        if lessons is not None:
            learning: list[Source | TextSource] = [*self._sources, *([text] if text else [])]
            for each in learning:
                for drawing, evidence in each.evidence.items():
                    lessons.go_on(f"{each.name} {drawing}", evidence.columns)
            for drawing, agreement in self._agreement.items():
                lessons.go_on(f"agreement {drawing}", agreement.evidence.columns)
            weakref.finalize(self, lessons.write)  # when nobody drafts with it any more

    def propose(self, state: DecodingState) -> TokenTree:
        started = time.perf_counter()
        self.learn(state)
        situation = self._situation(state)
        offered, budget = self._look(state, situation)
        written = [math.inf if row.done else len(row.tokens) for row in state.rows]
        draft = self._grow(state, situation, written, budget, offered)
        # Steps since each source was asked; it has read nothing of a text that has just begun.
        rested: list[int] = state.memories.setdefault(
            (self, "rested"), [_LONG] * len(self._sources)
        )
        asked: list[Source] = []
        trials: list[Trial] = []
        if draft.trees:
            plain = budget.seconds(0)  # which no look takes thrice, unless it was interrupted
            seconds = min(time.perf_counter() - started, 3 * plain)
            seconds += budget.seconds(draft.size) - plain
            trials.append(Trial(situation.looking, Draft(), draft, seconds))
        for i, source in enumerate(self._sources):
            gains = situation.gains[i][bisect_right(BOUNDS, draft.expected)]
            if self._again[i]:
                gains.take(1, budget.worth)
            elif not (self._always or gains.pick(budget.worth)):
                gains.learn(0, 0.0, 0.0)
                rested[i] += 1
                continue
            # One that first reads what was written since it was last asked makes no usual draft.
            as_usual = not source.reads_on or rested[i] < _LONG
            self._again[i] = _IN_A_ROW if not as_usual else max(self._again[i] - 1, 0)
            rested[i] = 0
            began = time.perf_counter()
            for own, drafted in zip(offered, source.draft(state), strict=True):
                own.append(drafted)
            asked.append(source)
            before, draft = draft, self._grow(state, situation, written, budget, offered)
            if not as_usual:  # part of what finding out costs
                situation.allowances[i].owe(time.perf_counter() - began)
                continue
            name = f"{source.name} of {situation.group}"
            usual = situation.drafting(source) or _USUAL * budget.seconds(0)
            self._clock.learn_drafting(name, time.perf_counter() - began, usual)
            seconds = self._clock.drafting(name) + self._clock.drafting(f"observing {source.name}")
            seconds += budget.seconds(draft.size) - budget.seconds(before.size)
            trials.append(Trial(gains, before, draft, seconds))
        if any(offered) and not (self._always or self.padded):
            larger = budget.untried(draft.size)
            if larger and situation.sizing.pay(budget.seconds(larger) - budget.seconds(draft.size)):
                draft = self._grow(state, situation, written, budget, offered, larger)
        size = draft.size
        if situation.graphs:  # made in the first steps of a text, which nobody times
            size = situation.graphs.pop()
        spare = size + 1 if self.padded else 1  # exactly so many nodes where trees are padded
        if size and draft.trees:
            tree = to_token_tree(draft.trees, state.roots_B.device, size, spare)
        else:
            tree = TokenTree.root_only(state.roots_B).with_spare(spare)
        step = state.memories[self] = Step(
            situation,
            budget,
            asked,
            trials,
            list(state.rows),
            written,
            max(row.length for row in state.rows),
            offered,
            expected=draft.expected,
            verified=tree.num_nodes * len(state.rows) + state.again,
            drafting=time.perf_counter() - started,
        )
        self._last = weakref.ref(step)
        return tree

    def most_again(self, rows: int) -> int:
        return most_again(self._clock, rows)

    def rest(self, state: DecodingState) -> None:
        self.learn(state)
        self._last = lambda: None

    def learn(self, state: DecodingState) -> None:
        """Compare what was drafted last with what was committed since. Before the next proposal
        this is done anyway; whoever lets another drafter propose in between does it before that."""
        step: Step | None = state.memories.pop(self, None)
        if step is None:
            return
        committed_B = [
            [] if math.isinf(written) else row.tokens[int(written) :]
            for row, written in zip(step.rows, step.written, strict=True)
        ]
        if not any(committed_B):
            return
        agreement = self._agreement.get(state.drawing)
        for committed, own in zip(committed_B, step.offered, strict=True):
            if committed and agreement is not None:
                agreement.learn(own, committed)
            elif committed:
                for proposal in own:
                    proposal.learn(committed)
        situation = step.situation
        for gains, before, behind, seconds in step.trials:
            accepted = before.accepted(committed_B), behind.accepted(committed_B)
            more_BX = np.array(accepted).T
            known, gained = situation.progress(step.written, more_BX, FURTHER**more_BX)
            gains.learn(1, gained - known, seconds)
        if step.verifying is not None:
            self._clock.learn(step.verified, max(step.verifying, 1e-9), step.context)
        seconds = self._clock.step(step.verified) + step.drafting
        # What was expected says more of what a second is worth than what one step happened to give.
        step.budget.learn(1.0 + step.expected, seconds)
        situation.grow(seconds)
        if self._lessons is not None:
            self._lessons.count()

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        last = self._last()
        for source in self._sources:
            if source.observes and (last is None or source in last.asked):
                started = time.perf_counter()
                source.observe(tree, logits_BNV)
                seconds = time.perf_counter() - started
                usual = _USUAL * self._clock.step(1)  # the first look may wait for the prompt
                self._clock.learn_drafting(f"observing {source.name}", seconds, usual)
                if last is not None:
                    last.observing += seconds

    def learn_seconds(self, nodes: int, seconds: float) -> None:
        if (last := self._last()) is not None:
            last.verifying = seconds - last.observing

    def _look(
        self, state: DecodingState, situation: Situation
    ) -> tuple[list[list[Proposal]], Budget]:
        """What the text suggests for every row, if that has been worth a look; and the budget of
        texts of which so much is expected."""
        looking = situation.looking
        if self._text is None or not (self._always or looking.pick(situation.budgets[0].worth)):
            looking.learn(0, 0.0, 0.0)
            return [[] for _ in state.rows], situation.budgets[0]
        found = self._text.draft(state)
        best = [max(proposal.expected() for proposal in own) for own in found]
        place = bisect_right(BOUNDS, sum(best) / len(best))
        return [list(own) for own in found], situation.budgets[place]

    def _grow(
        self,
        state: DecodingState,
        situation: Situation,
        written: Sequence[float],
        budget: Budget,
        offered: Sequence[Sequence[Proposal]],
        exactly: int | None = None,
    ) -> Draft:
        """The best trees of what is known so far."""
        if not any(offered):
            return Draft()
        most_B = [budget.most] * len(state.rows)
        if state.room is not None:
            most_B = [min(budget.most, nodes - 1) for nodes in state.room]
        least, chain_only = budget.least(), self._chain_only
        growing = [
            Growing(
                row.tokens[-1],
                () if row.done else own,
                most,
                least,
                chain_only=chain_only,
                further=FURTHER,
                agreement=self._agreement.get(state.drawing),
            )
            for row, own, most in zip(state.rows, offered, most_B, strict=True)
        ]
        # Graphs that are to be made take trees of any size.
        whole, pace = bool(situation.graphs), situation.pace(written)
        return grown(growing, budget, pace, whole=whole, exactly=exactly)

    def _situation(self, state: DecodingState) -> Situation:
        drawing, rows = state.drawing, len(state.rows)
        group = 1 << (rows - 1).bit_length()
        situation = self._situations.get((drawing, group))
        if situation is None:
            situation = self._situations[drawing, group] = Situation(
                self._clock,
                self._sizes,
                group,
                rows,
                self._sources,
                drawn=drawing != "greedy",
                padded=self.padded,
            )
            if self._lessons is not None:
                plain = partial(self._clock.step, group)
                for name, columns in situation.learning():
                    self._lessons.go_on(f"{drawing} {group} {name}", columns, plain)
        situation.move_to(rows, state.again)
        return situation


def text_drafter(most: int, corpus: CorpusIndex | None = None) -> BlendedDrafter:
    """Up to so many tokens that followed where the text or the corpus ended as it does now."""
    text = TextSource(most, corpus)
    return BlendedDrafter(Clock.flat(), range(most + 1), text=text, always=True, chain_only=True)
