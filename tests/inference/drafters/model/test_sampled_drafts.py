"""Drawn drafts: the text keeps the target's law, whatever they were drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads import DraftedModel
from medusa_heads.inference.acceptance import RULES, RejectionSampling
from medusa_heads.inference.drafters.model.walk import draw_different
from medusa_heads.inference.engine.noise import RNGS, Rng
from scripts.prove.sampling import chi_square
from tests.conftest import DEVICE, TinyLlama
from tests.inference.drafters.model.drafting import Costs, drafted, line

VOCAB = 8
BATCH = 250
PROMPT = [3, 1, 4, 1, 5, 2, 6]
WARPERS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "top_k": 0},
    "cold": {"temperature": 0.6, "top_k": 0},
    "top-k": {"top_k": 3},  # fewer tokens than some nodes have children
    "top-p": {"top_p": 0.7, "top_k": 0},
    "penalty": {"repetition_penalty": 1.6, "top_k": 0},
}
# All levels and siblings are walked: behind the prefill's token, two come out of the same tree.
TREES = ("sampled:3", "sampled:3x2", "sampled:4x1")


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama(vocab_size=VOCAB, hidden_size=32)
    made.generation_config.pad_token_id = 0
    return made.to(DEVICE)


@pytest.fixture(scope="module")
def drafts(target: Any, tiny_llama: TinyLlama) -> dict[str, Any]:
    near, noise = tiny_llama(vocab_size=VOCAB, hidden_size=32), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
    bad = tiny_llama(num_layers=1, vocab_size=VOCAB, hidden_size=32, seed=9)
    with torch.no_grad():
        bad.lm_head.weight.mul_(1.5)  # sure of what it does not know
    return {"near": near.to(DEVICE), "bad": bad.to(DEVICE), "itself": target}


def prompts(batch: int = BATCH) -> dict[str, Any]:
    ids_BT = torch.tensor([PROMPT], device=DEVICE).repeat(batch, 1)
    return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}


@torch.no_grad()
def exact(target: Any, options: dict[str, Any]) -> Tensor:
    """The joint law [V * V] of the second and third new token."""
    taken: list[Any] = []

    def take(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> Tensor:
        taken.append(logits_processor)
        return input_ids

    target.generate(**prompts(1), custom_generate=take, do_sample=True, **options)

    def law(ids_BT: Tensor) -> Tensor:
        logits_BV = target(ids_BT).logits[:, -1].float()
        return torch.cat(
            [taken[0](ids_BT[b, None], logits_BV[b, None]) for b in range(len(ids_BT))]
        ).softmax(-1)

    texts_BT, chances_B = prompts(1)["input_ids"], torch.ones(1, device=DEVICE)
    for _ in range(3):
        chances_B = (chances_B[:, None] * law(texts_BT)).flatten()
        fresh_B1 = torch.arange(VOCAB, device=DEVICE).repeat(len(texts_BT))[:, None]
        texts_BT = torch.cat([texts_BT.repeat_interleave(VOCAB, dim=0), fresh_B1], dim=1)
    return chances_B.view(VOCAB, -1).sum(0).cpu()


def p_value(
    target: Any,
    draft: Any,
    tree: str,
    options: dict[str, Any],
    samples: int,
    rows: int = BATCH,
    rng: Rng = "transformers",
    new: int = 3,
) -> tuple[float, float]:
    """Of the texts drawn with these drafts, so many at a time; and their tokens per step. No token
    behind the third is looked at."""
    if tree == "adaptive":
        # Several tokens behind a node, and nodes behind each of them.
        costs = [Costs(line(0.01, 11), forward=0.1, rows=rows)]
        model = drafted(target, [draft], costs, rng=rng)
    else:
        model = DraftedModel(target, draft, tree=tree, rng=rng)
    counts_C = torch.zeros(VOCAB * VOCAB)
    steps = tokens = 0
    torch.manual_seed(0)
    for _ in range(samples // rows):
        out: Any = model.generate(**prompts(rows), do_sample=True, max_new_tokens=new, **options)
        second_B, third_B = out[:, len(PROMPT) + 1].cpu(), out[:, len(PROMPT) + 2].cpu()
        counts_C += torch.bincount(second_B * VOCAB + third_B, minlength=VOCAB * VOCAB)
        steps += model.last_stats.steps
        tokens += model.last_stats.tokens
    statistic, degrees = chi_square(counts_C, exact(target, options))
    p = torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(statistic / 2))
    return float(p), tokens / steps


def check(target: Any, draft: Any, tree: str, warpers: str, samples: int, **options: Any) -> None:
    p, tokens_per_step = p_value(target, draft, tree, WARPERS[warpers], samples, **options)
    assert p > 1e-4
    assert tokens_per_step > 1.1  # an accepted draft, and the token behind it


@pytest.mark.parametrize(
    ("tree", "warpers", "rng"),
    [
        # Each of these is in a quick one.
        pytest.param(*each, marks=[] if quick else [pytest.mark.slow])
        for quick, each in (
            ((j, k) == (i == 0, i < 2), (tree, warpers, rng))
            for i, tree in enumerate((*TREES[:2], "adaptive"))
            for j, warpers in enumerate(("plain", "top-k"))
            for k, rng in enumerate(RNGS)
        )
    ],
)
def test_drawn_text_follows_the_target(
    target: Any, drafts: dict[str, Any], tree: str, warpers: str, rng: Rng
) -> None:
    check(target, drafts["bad"], tree, warpers, 1500 if tree == "sampled:3" else 2000, rng=rng)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 1])
def test_a_few_adaptive_texts_at_a_time_follow_the_target(
    target: Any, drafts: dict[str, Any], rows: int
) -> None:
    """What some texts teach decides how the next ones are drafted for."""
    p, tokens_per_step = p_value(target, drafts["near"], "adaptive", {"top_k": 0}, 400, rows, new=5)
    assert p > 1e-4 and tokens_per_step > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("tree", [*TREES, "adaptive"])
@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize("draft", ["near", "bad"])
def test_drawn_text_follows_the_target_closely(
    target: Any, drafts: dict[str, Any], draft: str, tree: str, warpers: str
) -> None:
    check(target, drafts[draft], tree, warpers, samples=10_000, new=5)


class AcceptsWhereLikelier(RejectionSampling):
    """Wrong: keeps a token if p >= q, and never else."""

    def _keep(self, p_V: Tensor, q_V: Tensor, drawn: Any) -> tuple[int, int | None]:
        for place, token in enumerate(drawn):
            if p_V[token] >= q_V[token]:
                return token, place
            p_V = (p_V - q_V).clamp_min(0)
        return int(torch.multinomial(p_V, 1)), None


class ResamplesFromTheTarget(RejectionSampling):
    """Wrong: what is rejected is drawn anew from p, not from its rest above q."""

    def _keep(self, p_V: Tensor, q_V: Tensor, drawn: Any) -> tuple[int, int | None]:
        for place, token in enumerate(drawn):
            if torch.rand(()) * q_V[token] < p_V[token]:
                return token, place
        return int(torch.multinomial(p_V, 1)), None


class ForgetsWhatWasDrawn(RejectionSampling):
    """Wrong here: rests as if siblings had been drawn with putting back."""

    def _keep(self, p_V: Tensor, q_V: Tensor, drawn: Any) -> tuple[int, int | None]:
        for place, token in enumerate(drawn):
            if torch.rand(()) * q_V[token] < p_V[token]:
                return token, place
            rest_V = (p_V - q_V).clamp_min(0)
            p_V = rest_V / rest_V.sum()
        return int(torch.multinomial(p_V, 1)), None


@pytest.mark.parametrize(
    ("rule", "tree", "samples"),
    [
        (AcceptsWhereLikelier, "sampled:3", 750),
        pytest.param(ResamplesFromTheTarget, "sampled:3", 1500, marks=pytest.mark.slow),
        (ForgetsWhatWasDrawn, "sampled:3x2", 3000),
        pytest.param(ForgetsWhatWasDrawn, "adaptive", 4000, marks=pytest.mark.slow),
    ],
)
def test_wrong_rules_are_caught(
    target: Any,
    drafts: dict[str, Any],
    rule: type[RejectionSampling],
    tree: str,
    samples: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative controls: the same test, the same drafts."""
    monkeypatch.setitem(RULES, "lossless", rule)
    p, _ = p_value(target, drafts["bad"], tree, WARPERS["plain"], samples)
    assert p < 1e-6


def test_drafts_of_the_target_itself_are_all_kept(target: Any, drafts: dict[str, Any]) -> None:
    """Under any warper: p and q are then one and the same."""
    for options in WARPERS.values():
        model = DraftedModel(target, drafts["itself"], tree="sampled:3", rng="transformers")
        model.generate(**prompts(1), do_sample=True, max_new_tokens=41, **options)
        assert model.last_stats.accepted[3] == 10


def test_siblings_are_worth_more_than_one_token(target: Any, drafts: dict[str, Any]) -> None:
    """At the same number of forwards of the draft model."""
    chain, tree = (
        p_value(target, drafts["bad"], tree, {"top_k": 0}, 500)[1]
        for tree in ("sampled:2", "sampled:3x2")
    )
    assert tree > chain + 0.1


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=str
)
def test_ragged_batches(target: Any, drafts: dict[str, Any], options: dict[str, Any]) -> None:
    """Greedy text is generate()'s; drawn text ends where its end token stands."""
    ids_BT = torch.randint(1, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1))
    mask_BT = (torch.arange(12) >= torch.tensor([[0], [5], [9], [2]])).long()
    inputs: dict[str, Any] = {
        "input_ids": (ids_BT * mask_BT).to(DEVICE),
        "attention_mask": mask_BT.to(DEVICE),
    }
    settings = {**options, "max_new_tokens": 40, "eos_token_id": 7}
    model = DraftedModel(target, drafts["near"], tree="sampled:3x2x1", rng="transformers")
    torch.manual_seed(0)
    got_BT: Any = model.generate(**inputs, **settings)
    if not options["do_sample"]:
        assert torch.equal(got_BT, target.generate(**inputs, **settings))
    assert model.last_stats.tokens_per_step > 1.2
    for new_T in got_BT[:, 12:].tolist():
        assert not any(new_T[new_T.index(7) + 1 :]) if 7 in new_T else len(new_T) == 40


def test_tokens_drawn_one_after_the_other_without_putting_back() -> None:
    """Ordered pairs have the chance p(a) p(b) / (1 - p(a))."""
    torch.manual_seed(0)
    p_V = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    pairs_BR = draw_different(p_V.expand(1, 40_000, 5).contiguous(), 2)[0]
    counts_C = torch.bincount(pairs_BR[:, 0] * 5 + pairs_BR[:, 1], minlength=25).float()
    law_VV = p_V[:, None] * p_V / (1 - p_V[:, None])
    statistic, degrees = chi_square(counts_C, law_VV.fill_diagonal_(0).flatten())
    assert torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(statistic / 2)) > 1e-3


def test_processors_that_count_their_calls_are_asked_about_committed_text_alone(
    target: Any, drafts: dict[str, Any]
) -> None:
    class Counting:
        lengths: list[int] = []  # noqa: RUF012

        def __call__(self, ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
            self.lengths.append(ids_BT.shape[1])
            return scores_BV

    model = DraftedModel(target, drafts["near"], tree="sampled:3", rng="transformers")
    counting: Any = Counting()
    out: Any = model.generate(
        **prompts(1),
        do_sample=True,
        max_new_tokens=20,
        logits_processor=LogitsProcessorList([counting]),
    )
    assert counting.lengths == list(range(len(PROMPT), out.shape[1]))


def test_scores_of_drawn_text_are_recorded(target: Any, drafts: dict[str, Any]) -> None:
    model = DraftedModel(target, drafts["near"], tree="sampled:3x2", rng="transformers")
    out: Any = model.generate(
        **prompts(1),
        do_sample=True,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert len(out.scores) == 12
    logits_TV = target(out.sequences).logits[0, len(PROMPT) - 1 : -1]
    scores_TV = torch.cat(out.scores)
    finite = scores_TV.isfinite()
    torch.testing.assert_close(scores_TV[finite], logits_TV[finite], atol=1e-4, rtol=1e-4)
