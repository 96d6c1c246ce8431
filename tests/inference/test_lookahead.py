"""Lookahead: the window says what Jacobi iterations say, and the text stays the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads.inference import training_free
from medusa_heads.inference.drafters import lookahead
from medusa_heads.inference.drafters.lookahead import (
    COLUMNS,
    NGRAM,
    WINDOW,
    Choice,
    LookaheadDrafter,
    PoolTrees,
)
from medusa_heads.inference.drafters.trust import Belief
from medusa_heads.inference.ngram_pool import NgramPool
from medusa_heads.inference.row import Row, StopCheck
from medusa_heads.inference.state import DecodingState
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.inference.training_free import TrainingFreeModel
from medusa_heads.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.padded import padded

END = 11  # of some rows' text, but not of all
COSTS = {0: 1.0, 3: 1.02, 7: 1.05, 15: 1.1}
IDS_BT = torch.tensor([[5, 6, 7, 5, 6, 9, 5, 6]], device=DEVICE)


@pytest.fixture(autouse=True)
def cheap_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a machine on which nodes pay, as they do not on a model this small."""
    monkeypatch.setattr(training_free, "target_costs", lambda *_: StepCosts(COSTS))


class Watched(LookaheadDrafter):
    """Notes every tree, what the target said of it, and the text that it was drafted behind."""

    def __init__(self) -> None:
        super().__init__(StepCosts(COSTS))
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
    drafter = drafted._by_rows[len(ids_BT)] = Watched()
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
    expected_BT = model.generate(IDS_BT, max_new_tokens=400, do_sample=False)
    drafted = TrainingFreeModel(model, "lookahead")
    shares = []
    for slow in (1.0, 3.0):
        seen: list[int] = []

        class Counting(LookaheadDrafter):
            def propose(self, state: DecodingState) -> TokenTree:
                tree = super().propose(state)
                seen.append(tree.num_nodes > WINDOW)  # noqa: B023
                return tree

        beside = StepCosts({nodes: slow * seconds for nodes, seconds in COSTS.items()})
        drafted._by_rows[1] = Counting(beside, StepCosts({0: 1.0, 1: 2.0}))
        got_BT: Any = drafted.generate(IDS_BT, max_new_tokens=400, do_sample=False)
        assert torch.equal(got_BT, expected_BT)
        shares.append(sum(seen) / len(seen))
    assert shares[0] > 0.6 > shares[1]


def test_the_fastest_way_is_found_and_the_other_tried_again() -> None:
    choice = Choice(2)
    gone = []
    for step in range(2000):
        gone.append(choice.next())
        faster = 0 if step < 700 else 1
        choice.learn(gone[-1], 2.0, 1.0 if gone[-1] == faster else 1.5)
    assert 0 < sum(gone[:700]) < 100
    assert sum(gone[-500:]) > 400
    assert {Choice(1).next() for _ in range(3)} == {0}


class Blind(LookaheadDrafter):
    """Negative control: drafts that also see the window."""

    def propose(self, state: DecodingState) -> TokenTree:
        tree = super().propose(state)
        tree.ancestors_BNN[:, :, -WINDOW:] = True
        return tree


def test_a_way_left_aside_is_not_credited_with_the_others_steps(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead, "_TRIAL", 3)
    monkeypatch.setattr(lookahead, "_BETWEEN_TRIALS", 40)
    counts: list[int] = []
    monkeypatch.setattr(Belief, "learn", lambda self, promised, accepted: counts.append(accepted))
    model = TrainingFreeModel(tiny_llama(), "lookahead")
    model.generate(IDS_BT, max_new_tokens=200)
    assert counts and max(counts) <= model.drafter.num_nodes - WINDOW - 1


def test_a_window_that_is_seen_is_caught(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    expected_BT = model.generate(IDS_BT, max_new_tokens=40, do_sample=False)
    drafted = TrainingFreeModel(model, "lookahead")
    got: dict[type[LookaheadDrafter], Any] = {}
    for kind in (LookaheadDrafter, Blind):
        drafted._by_rows[1] = kind(StepCosts(COSTS))
        got[kind] = drafted.generate(IDS_BT, max_new_tokens=40, do_sample=False)
    assert torch.equal(got[LookaheadDrafter], expected_BT)
    assert not torch.equal(got[Blind], expected_BT)


def test_compiled(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    drafted = TrainingFreeModel(model, "lookahead", compile=True, compile_backend="eager")
    drafted._by_rows[1] = LookaheadDrafter(StepCosts({7: 1.0}, fixed=True))
    expected_BT = model.generate(IDS_BT, max_new_tokens=30, do_sample=False)
    got_BT: Any = drafted.generate(IDS_BT, max_new_tokens=30, do_sample=False)
    assert torch.equal(got_BT, expected_BT)


def test_rows_that_have_ended_count_for_nothing(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled batch keeps them: every step commits a token at least to each of the others."""
    gains: list[float] = []
    learn = Choice.learn

    def noted(self: Choice, way: int, gained: float, seconds: float) -> None:
        gains.append(gained)
        learn(self, way, gained, seconds)

    monkeypatch.setattr(Choice, "learn", noted)
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    model.generation_config.pad_token_id = 0
    drafted = TrainingFreeModel(model, "lookahead", compile=True, compile_backend="eager")
    monkeypatch.setattr(drafted.target, "_forward", model.forward)  # saves the time of compiling
    drafted._by_rows[3] = LookaheadDrafter(StepCosts({7: 1.0}, fixed=True))
    options: Any = {**padded([0, 2, 0], 9), "do_sample": False, "max_new_tokens": 40}
    options["eos_token_id"] = END
    got_BT: Any = drafted.generate(**options)
    assert torch.equal(got_BT, model.generate(**options))
    ended_B = (got_BT[:, 9:] == END).any(1)
    assert ended_B.any() and not ended_B.all()
    assert min(gains) >= 1


def test_the_pool_gives_the_latest_first(tiny_llama: TinyLlama) -> None:
    pool = NgramPool(3, most=2)
    for ngram in ((1, 2, 3), (1, 4, 5), (2, 9, 9), (1, 2, 3), (1, 6, 7)):
        pool.add(ngram)
    assert pool.behind(1) == [(6, 7), (2, 3)]
    assert pool.behind(2) == [(9, 9)] and pool.behind(3) == []
    tree = PoolTrees(pool)._grow(1)
    assert tree.tokens == [1, 6, 7, 2, 3] and tree.parents == [-1, 0, 1, 0, 3]
    assert tree.chances[1] == lookahead._FIRST[0] > tree.chances[3]
