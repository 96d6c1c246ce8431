"""Several draft models: the best of them drafts most, and the text stays the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import DraftedModel
from medusa_heads.inference.acceptance import RULES, RejectionSampling
from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.drafters.extra.chosen_draft import ChosenDraftDrafter
from medusa_heads.inference.drafters.model.choice import DraftChoice
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree
from scripts.prove.sampling import chi_square
from tests.conftest import DEVICE, TinyLlama
from tests.inference.drafters.model.drafting import Costs, drafted, line, steps
from tests.inference.drafters.model.test_sampled_drafts import BATCH, PROMPT, exact, prompts
from tests.inference.padded import padded
from tests.inference.reference import reference

VOCAB = 8
END = 7  # of some rows' text, but not of all
SMALL = Costs(line(0.02), forward=0.05)
LARGE = Costs(line(0.02), forward=0.10)
TREES = ("auto", "chain:3", "dynamic:5", "sampled:3", "sampled:2x2")
ALIKE = ("chain:3", "dynamic:5", "sampled:3", "sampled:2x2")


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama(vocab_size=VOCAB, hidden_size=32)
    made.generation_config.pad_token_id = 0
    return made.to(DEVICE)


@pytest.fixture(scope="module")
def bad(tiny_llama: TinyLlama) -> Any:
    """Small, and sure of what it does not know."""
    made = tiny_llama(num_layers=1, vocab_size=VOCAB, hidden_size=16, seed=9)
    with torch.no_grad():
        made.lm_head.weight.mul_(1.5)
    return made.to(DEVICE)


@pytest.fixture(scope="module")
def near(target: Any, tiny_llama: TinyLlama) -> Any:
    made, noise = tiny_llama(vocab_size=VOCAB, hidden_size=32), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return made.to(DEVICE)


def choosing(
    target: Any,
    drafts: Sequence[Any],
    tree: str,
    kind: type[ChosenDraftDrafter] = ChosenDraftDrafter,
    *,
    chain_only: bool = False,
    rows: int = 1,
) -> DraftedModel:
    costs = [each._replace(rows=rows) for each in (SMALL, LARGE)]
    return drafted(target, drafts, costs, tree, kind, chain_only=chain_only)


def ragged() -> dict[str, Tensor]:
    return padded((0, 5, 9, 2), 12, range(1, VOCAB))


@pytest.mark.parametrize(
    "tree", [pytest.param(tree, marks=pytest.mark.slow if tree in ALIKE else ()) for tree in TREES]
)
def test_equals_generate(target: Any, bad: Any, near: Any, tree: str) -> None:
    """One text and ragged batches, greedy, whoever drafts; rows end at different steps."""
    model = choosing(target, [bad, near], tree)
    ended, penalised = {"eos_token_id": END}, {"repetition_penalty": 1.3}
    texts: list[tuple[dict[str, Tensor], dict[str, Any]]] = [(prompts(1), {}), (ragged(), ended)]
    for inputs, options in (*texts, (ragged(), penalised), (prompts(1), {})):
        settings: dict[str, Any] = {**inputs, **options, "do_sample": False}
        settings["max_new_tokens"] = 40
        got_BT: Any = model.generate(**settings)
        assert torch.equal(got_BT, reference(target, **settings))
    assert min(steps(model)) >= 4  # both were tried


@pytest.mark.parametrize("tree", ["chain:3", pytest.param("dynamic:5", marks=pytest.mark.slow)])
def test_chosen_tokens_leave_the_text_of_a_seed(
    target: Any, bad: Any, near: Any, tree: str
) -> None:
    model = choosing(target, [bad, near], tree)
    for seed in range(2):
        settings: dict[str, Any] = {**prompts(1), "do_sample": True, "max_new_tokens": 40}
        torch.manual_seed(seed)
        expected_BT = reference(target, **settings)
        torch.manual_seed(seed)
        got_BT: Any = model.generate(**settings)
        assert torch.equal(got_BT, expected_BT)
    assert min(steps(model)) >= 4


class TakesTheDraft(RejectionSampling):
    """Wrong: commits whatever was drafted."""

    def __call__(self, tree: TokenTree, logits_BNV: Tensor, rows: Any) -> list[list[int]]:
        paths = []
        for row, tokens in zip(rows, tree.tokens_BN.tolist(), strict=True):
            path = [0]
            for node, token in enumerate(tokens[1:], 1):
                if row.done or row.commit(token):
                    break
                path.append(node)
            paths.append(path)
            if not row.done:
                row.commit(int(logits_BNV[0, -1].argmax()))
        return paths


def test_a_wrong_rule_changes_the_text(
    target: Any, bad: Any, near: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the equality above."""
    settings: dict[str, Any] = {**prompts(1), "do_sample": False, "max_new_tokens": 60}
    expected_BT = target.generate(**settings)
    monkeypatch.setitem(RULES, "lossless", TakesTheDraft)
    got_BT: Any = choosing(target, [bad, near], "chain:3").generate(**settings)
    assert not torch.equal(got_BT, expected_BT)


def test_whoever_was_left_aside_catches_up(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of the target itself are all right, however long it did not read."""
    turns = cycle([0, 1, 1, 0, 1, 1, 1, 0, 0, 1])
    monkeypatch.setattr(DraftChoice, "pick", lambda *_: next(turns))
    model = choosing(target, [target, target], "chain:3")
    for inputs in (prompts(1), ragged()):
        model.generate(**inputs, do_sample=False, max_new_tokens=61)
        rows = len(inputs["input_ids"])
        assert model.last_stats.accepted == {0: rows, 3: 15 * rows}
    assert steps(model) == [12, 18]


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain:3", "auto"])
def test_the_better_one_drafts_most(target: Any, bad: Any, near: Any, tree: str) -> None:
    """Wherever it stands, and although it costs twice as much."""
    model = choosing(target, [bad, near], tree, chain_only=True)
    model.generate(**prompts(1), do_sample=False, max_new_tokens=350)
    ours, theirs = steps(model)[1], steps(model)[0]
    assert ours > 0.7 * (ours + theirs) and theirs >= 4
    # As good as each other: the small one costs less.
    model = choosing(target, [near, near], "chain:3")
    model.generate(**prompts(1), do_sample=False, max_new_tokens=200)
    assert steps(model)[0] > 0.6 * sum(steps(model))


def p_value(target: Any, drafts: Sequence[Any], tree: str, kind: Any, samples: int) -> float:
    """Of the second and third token of drawn texts."""
    model = choosing(target, drafts, tree, kind, rows=BATCH)
    counts_C = torch.zeros(VOCAB * VOCAB)
    torch.manual_seed(0)
    for _ in range(samples // BATCH):
        out: Any = model.generate(**prompts(), do_sample=True, max_new_tokens=3, top_k=0)
        second_B, third_B = out[:, len(PROMPT) + 1].cpu(), out[:, len(PROMPT) + 2].cpu()
        counts_C += torch.bincount(second_B * VOCAB + third_B, minlength=VOCAB * VOCAB)
    assert kind is PicksTheSurer or min(steps(model)) > 2
    statistic, degrees = chi_square(counts_C, exact(target, {"top_k": 0}))
    return float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(statistic / 2)))


class PicksTheSurer(ChosenDraftDrafter):
    """Wrong: has both of them draft, and takes for every row what its author was surer of."""

    def propose(self, state: DecodingState) -> TokenTree:
        """Of this very step's tokens."""
        one, other = (each.propose(state) for each, _ in self._drafters)  # type: ignore[union-attr]
        assert one.log_probs_BN is not None and other.log_probs_BN is not None
        surer_B = one.log_probs_BN.sum(1) > other.log_probs_BN.sum(1)
        probs = {
            node: torch.where(surer_B[:, None], one.drawn_from[node], other.drawn_from[node])
            for node in one.drawn_from
        }
        tokens_BN = torch.where(surer_B[:, None], one.tokens_BN, other.tokens_BN)
        return replace(one, tokens_BN=tokens_BN, drawn_from=probs)


@pytest.mark.parametrize("tree", [pytest.param("auto", marks=pytest.mark.slow), "sampled:3"])
def test_drawn_text_follows_the_target(target: Any, bad: Any, near: Any, tree: str) -> None:
    assert p_value(target, [bad, near], tree, ChosenDraftDrafter, 3500) > 1e-4


def test_a_choice_that_has_seen_the_drafts_is_caught(target: Any, bad: Any, near: Any) -> None:
    """Negative control: the same test."""
    assert p_value(target, [bad, near], "sampled:3", PicksTheSurer, 3500) < 1e-6


def test_a_list_of_draft_models(
    target: Any, bad: Any, near: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As users give it, with costs as measured here, in several batch sizes."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path))
    for tree in ("auto", "chain:2"):
        model = DraftedModel(target, [bad, near], tree=tree)
        assert model.draft is model.drafts[0] and len(model.drafts) == 2
        for inputs in (prompts(1), ragged()):
            settings: dict[str, Any] = {**inputs, "do_sample": False, "max_new_tokens": 30}
            got_BT: Any = model.generate(**settings)
            assert torch.equal(got_BT, target.generate(**settings))
        assert len(model.draft_steps) == 2 and sum(model.draft_steps) > 0
    assert DraftedModel(target, [near], tree="chain").draft_steps == [0]
    with pytest.raises(ValueError, match="at least one draft model"):
        DraftedModel(target, [])
    with pytest.raises(ValueError, match="at least one draft model"):
        DraftedModel.from_pretrained([])


@pytest.mark.usefixtures("untraced")
def test_a_compiled_target_chooses_among_chains(target: Any, bad: Any, near: Any) -> None:
    model = DraftedModel(target, [bad, near], compile=True, compile_backend="eager")
    settings: dict[str, Any] = {**ragged(), "do_sample": False, "max_new_tokens": 30}
    got_BT: Any = model.generate(**settings)
    assert torch.equal(got_BT, target.generate(**settings)) and model.tree == "chain:4"


@pytest.mark.usefixtures("untraced")
def test_rows_that_have_ended_count_for_nothing(
    target: Any, bad: Any, near: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled batch keeps them: every step commits a token at least to each of the others."""
    gains: list[float] = []
    learn = DraftChoice.learn

    def noted(self: DraftChoice, tokens: float, seconds: float) -> None:
        gains.append(tokens)
        learn(self, tokens, seconds)

    monkeypatch.setattr(DraftChoice, "learn", noted)
    model = DraftedModel(target, [bad, near], compile=True, compile_backend="eager")
    settings: dict[str, Any] = {**ragged(), "do_sample": False, "max_new_tokens": 40}
    settings["eos_token_id"] = END
    got_BT: Any = model.generate(**settings)
    assert torch.equal(got_BT, target.generate(**settings))
    ended_B = (got_BT[:, settings["input_ids"].shape[1] :] == END).any(1)
    assert ended_B.any() and not ended_B.all()
    assert min(gains) >= 1


def test_every_token_is_counted_once(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever drafted for it."""
    learnt: list[float] = []
    learn = Budget.learn

    def noted(self: Budget, tokens: float, seconds: float) -> None:
        learnt.append(tokens)
        learn(self, tokens, seconds)

    monkeypatch.setattr(Budget, "learn", noted)
    turns = cycle([1, 2, 0])
    monkeypatch.setattr(DraftChoice, "pick", lambda *_: next(turns))
    choosing(target, [target, target], "auto").generate(
        **prompts(1), do_sample=False, max_new_tokens=90
    )
    assert 70 < sum(learnt) < 90
