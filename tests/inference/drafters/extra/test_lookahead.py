"""Lookahead: the window says what Jacobi iterations say, and the text stays the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import Evidence
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.extra import lookahead
from medusa_heads.inference.drafters.extra.lookahead import (
    COLUMNS,
    NGRAM,
    WINDOW,
    LookaheadDrafter,
    NgramPool,
    NgramSource,
    ngram_proposal,
)
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.models import training_free
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.inference.plan import adaptive as adaptive_plan
from medusa_heads.trees.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.drafters.growing import grow
from tests.inference.padded import padded

END = 11  # of some rows' text, but not of all
CHEAP = {1: 1.0, 16: 1.05, 32: 1.1}
DEAR = {1: 1.0, 2: 2.0, 16: 6.0}
IDS_BT = torch.tensor([[5, 6, 7, 5, 6, 9, 5, 6]], device=DEVICE)


def clock(steps: dict[int, float] = CHEAP) -> Clock:
    return Clock(steps, learns=False)


@pytest.fixture(autouse=True)
def cheap_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nodes pay, as they do not on a model this small."""
    for module in (training_free, adaptive_plan):
        monkeypatch.setattr(module, "target_clock", lambda *_: clock())


def made(
    kind: type[LookaheadDrafter] = LookaheadDrafter,
    steps: dict[int, float] = CHEAP,
    always: bool = True,
) -> Any:
    pool = NgramPool()
    drafts = BlendedDrafter(clock(steps), (0, 3, 7, 15), sources=[NgramSource(pool)])
    return kind(drafts, pool, clock(steps), always=always)


class Watched(LookaheadDrafter):
    """Notes every tree, what the target said of it, and the text that it was drafted behind."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[list[int]], TokenTree, Tensor]] = []
        self.texts: list[list[int]] = []

    def propose(self, state: DecodingState) -> TokenTree:
        self.texts = [
            row.ids_1T()[0, padding:].tolist()
            for row, padding in zip(state.rows, state.padding, strict=True)
        ]
        return super().propose(state)

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        super().observe(tree, logits_BNV)
        if self.texts:  # not the prompt
            self.seen.append((self.texts, tree, logits_BNV.argmax(-1)))


def watched(model: Any, ids_BT: Tensor, **options: Any) -> Watched:
    drafted = TrainingFreeModel(model, "lookahead")
    drafter: Watched = made(Watched)
    drafted.drafter = drafter
    drafted.generate(ids_BT, do_sample=False, **options)
    return drafter


def test_the_window_runs_jacobi_iterations(tiny_llama: TinyLlama) -> None:
    """Each guess is the target's own token behind the column that it continues: told by plain
    forwards over the text and that column, in a batch with padding."""
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    ids_BT = torch.randint(3, 24, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask_BT = (torch.arange(9) >= torch.tensor([[0], [4]])).long().to(DEVICE)
    options: dict[str, Any] = {"max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}
    drafter = watched(model, ids_BT, attention_mask=mask_BT, **options)
    compared = 0
    for texts, tree, said_BN in drafter.seen:
        for text, tokens, said in zip(
            texts, tree.tokens_BN.tolist(), said_BN.tolist(), strict=True
        ):
            if len(text) > 9 + 40 - 4 - COLUMNS - NGRAM:
                continue  # what is guessed beyond the text's last position stands at the last one
            guesses = tokens[-WINDOW:]
            for column in range(COLUMNS):
                path = guesses[: column + 1]
                path += [guesses[level * COLUMNS + column] for level in range(1, NGRAM - 1)]
                with torch.no_grad():
                    logits_V = model(torch.tensor([text + path], device=DEVICE)).logits[0, -1]
                assert int(logits_V.argmax()) == said[column - COLUMNS]
                compared += 1
    assert compared > 10 * COLUMNS


def test_guesses_become_ngrams_and_stay_where_they_were_made_for(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    drafter = watched(model, IDS_BT, max_new_tokens=40)
    _, tree, said_BN = drafter.seen[0]
    first = [tree.tokens_BN[0, -WINDOW + level * COLUMNS :][:COLUMNS] for level in range(NGRAM - 1)]
    # Before the first step the prompt is guessed to come again.
    prompt = IDS_BT[0].tolist()
    assert [row.tolist() for row in first] == [
        [prompt[(level + column) % len(prompt)] for column in range(COLUMNS)]
        for level in range(NGRAM - 1)
    ]
    steps = zip(drafter.seen, drafter.seen[1:], strict=False)
    for ((before,), old, said_BN), ((after,), new, _) in steps:
        reached = len(after) - len(before) - 1
        old_levels = old.tokens_BN[0, -WINDOW:].view(NGRAM - 1, COLUMNS).tolist()
        new_levels = new.tokens_BN[0, -WINDOW:].view(NGRAM - 1, COLUMNS).tolist()
        moved = [*old_levels[1:], said_BN[0, -COLUMNS:].tolist()]
        for now, then in zip(new_levels, moved, strict=True):
            assert now[: max(COLUMNS - reached, 0)] == then[reached:]
    ngrams = {(token, *rest) for token in range(24) for rest in drafter.pool.behind(token) if rest}
    (*_, (_, tree, said_BN)) = drafter.seen
    levels = tree.tokens_BN[0, -WINDOW:].view(NGRAM - 1, COLUMNS).tolist()
    assert set(zip(*levels, said_BN[0, -COLUMNS:].tolist(), strict=True)) <= ngrams


def test_ngrams_are_accepted(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    drafted = TrainingFreeModel(model, "lookahead")
    drafted.generate(IDS_BT, max_new_tokens=70, do_sample=False)
    assert drafted.last_stats.tokens_per_step > 1.2


def test_a_tree_that_was_not_verified_teaches_nothing(tiny_llama: TinyLlama) -> None:
    """What an interrupted text left behind is not read with the next one's logits."""
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    drafter = watched(model, IDS_BT, max_new_tokens=8)
    (*_, (_, tree, _)) = drafter.seen
    before = [drafter.pool.behind(token) for token in range(24)]
    window = lookahead._Window(Row(0, 1, IDS_BT[0], StopCheck(StoppingCriteriaList())), 0)
    drafter._asked = (tree, [window])
    prompt = TokenTree.root_only(IDS_BT[:, -1])
    drafter.observe(prompt, torch.randn(1, COLUMNS, 24))
    assert [drafter.pool.behind(token) for token in range(24)] == before
    drafter.observe(tree, torch.randn(1, tree.num_nodes, 24))  # that text is over
    assert [drafter.pool.behind(token) for token in range(24)] == before


def test_a_window_that_does_not_pay_is_left_out(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    expected_BT = model.generate(IDS_BT, max_new_tokens=200, do_sample=False)
    drafted = TrainingFreeModel(model, "lookahead")
    shares = []
    for steps in (CHEAP, DEAR):
        seen: list[bool] = []

        class Counting(LookaheadDrafter):
            def propose(self, state: DecodingState) -> TokenTree:
                tree = super().propose(state)
                seen.append(tree.num_nodes > WINDOW)  # noqa: B023
                return tree

        drafted.drafter = made(Counting, steps, always=False)
        got_BT: Any = drafted.generate(IDS_BT, max_new_tokens=200, do_sample=False)
        assert torch.equal(got_BT, expected_BT)
        shares.append(sum(seen) / len(seen))
    assert shares[0] > 0.7 > 0.5 > shares[1]


@pytest.mark.parametrize("better", [0, 1])
def test_the_way_that_gives_more_is_gone(better: int) -> None:
    ways = lookahead._Ways(clock(), 1)
    gone = []
    for _ in range(2000):
        gone.append(ways.next())
        ways.learn(2.0 if gone[-1] == better else 1.0, 1.0)
    assert gone[1000:].count(better) > 750
    assert gone.count(1 - better) > 0


class Blind(LookaheadDrafter):
    """Negative control: drafts that also see the window."""

    def propose(self, state: DecodingState) -> TokenTree:
        tree = super().propose(state)
        tree.ancestors_BNN[:, :, -WINDOW:] = True
        return tree


def test_a_window_that_is_seen_is_caught(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    expected_BT = model.generate(IDS_BT, max_new_tokens=40, do_sample=False)
    drafted = TrainingFreeModel(model, "lookahead")
    got: dict[type[LookaheadDrafter], Any] = {}
    for kind in (LookaheadDrafter, Blind):
        drafted.drafter = made(kind)
        got[kind] = drafted.generate(IDS_BT, max_new_tokens=40, do_sample=False)
    assert torch.equal(got[LookaheadDrafter], expected_BT)
    assert not torch.equal(got[Blind], expected_BT)


@pytest.mark.usefixtures("untraced")
def test_compiled(tiny_llama: TinyLlama) -> None:
    """Every step verifies one of four numbers of nodes, the window among them."""
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    drafted = TrainingFreeModel(model, "lookahead", compile=True, compile_backend="eager")
    drafter = drafted.drafter
    assert isinstance(drafter, LookaheadDrafter)
    sizes: set[int] = set()
    propose = drafter.propose

    def watched(state: DecodingState) -> TokenTree:
        tree = propose(state)
        sizes.add(tree.num_nodes)
        return tree

    drafter.propose = watched  # type: ignore[method-assign]
    expected_BT = model.generate(IDS_BT, max_new_tokens=30, do_sample=False)
    got_BT: Any = drafted.generate(IDS_BT, max_new_tokens=30, do_sample=False)
    assert torch.equal(got_BT, expected_BT)
    assert sizes <= {*(1 + WINDOW + size for size in (0, 7, 15)), drafter.num_nodes}
    assert drafter.num_nodes in sizes


def test_rows_that_have_ended_count_for_nothing(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled batch keeps them: every step commits a token at least to each of the others."""
    gains: list[float] = []
    learn = lookahead._Ways.learn

    def noted(self: lookahead._Ways, tokens: float, seconds: float) -> None:
        gains.append(tokens)
        learn(self, tokens, seconds)

    monkeypatch.setattr(lookahead._Ways, "learn", noted)
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    model.generation_config.pad_token_id = 0
    drafted = TrainingFreeModel(model, "lookahead", compile=True, compile_backend="eager")
    monkeypatch.setattr(drafted.target, "_forward", model.forward)  # saves the time of compiling
    options: Any = {**padded([0, 2, 0], 9), "do_sample": False, "max_new_tokens": 40}
    options["eos_token_id"] = END
    got_BT: Any = drafted.generate(**options)
    assert torch.equal(got_BT, model.generate(**options))
    ended_B = (got_BT[:, 9:] == END).any(1)
    assert ended_B.any() and not ended_B.all()
    assert min(gains) >= 1


def test_the_pool_gives_the_latest_first() -> None:
    pool = NgramPool(most=2)
    for ngram in ((1, 2, 3), (1, 4, 5), (2, 9, 9), (1, 2, 3), (1, 6, 7)):
        pool.add(ngram)
    assert pool.behind(1) == [(6, 7), (2, 3)]
    assert pool.behind(2) == [(9, 9)] and pool.behind(3) == []
    tree = grow(1, [ngram_proposal(Evidence([1.0] * 32), pool, 1)], most=9)
    assert tree.tokens == [1, 6, 7, 2, 3] and tree.parents == [-1, 0, 1, 0, 3]
    first, then = lookahead._FIRST[0], lookahead._NEXT
    assert tree.chances[1:3] == pytest.approx([first, first * then])


def test_ngrams_that_begin_alike_share_their_nodes() -> None:
    pool = NgramPool(most=3)
    for ngram in ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 8, 9)):
        pool.add(ngram)
    tree = grow(1, [ngram_proposal(Evidence([1.0] * 32), pool, 1)], most=9)
    assert sorted(zip(tree.tokens, tree.parents, strict=True)) == sorted(
        [(1, -1), (2, 0)]
        + [(token, tree.tokens.index(before)) for before, token in ((2, 3), (2, 8))]
        + [(token, tree.tokens.index(before)) for before, token in ((3, 4), (3, 5), (8, 9))]
    )
