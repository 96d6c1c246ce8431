"""Keyed noise: a seed's text is the same whatever is drafted, and drafts know what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    set_seed,
)

from medusa_heads import DraftedModel, MedusaModel, TrainingFreeModel
from medusa_heads.inference.acceptance import SampleThenMatch
from medusa_heads.inference.drafters.coupling import as_drawn
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.dynamic_tree import Ranking
from tests.inference.walking import VOCAB, row, tree

ASSETS = Path(__file__).parents[3] / "assets"
SLOW = pytest.mark.slow
PROMPT = [12, 40, 7, 300, 15, 9]
OTHER = [400, 33, 21]
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 40, "eos_token_id": None}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel.from_pretrained(str(ASSETS / "demo-target"), dtype=torch.float32)


@pytest.fixture(scope="module")
def heads(target: TargetModel) -> Any:
    return MedusaModel.from_pretrained(str(ASSETS / "demo-heads"), dtype=torch.float32).heads


def text(model: Any, prompts: list[list[int]] | None = None, seed: int = 3, **more: Any) -> Tensor:
    """The new tokens, [B, T]."""
    prompts = prompts or [PROMPT]
    longest = max(map(len, prompts))
    here: Any = {"device": model.target.device}
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts], **here)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], **here)
    torch.manual_seed(seed)
    options = {"max_new_tokens": 31, "pad_token_id": 0, **SAMPLING, **more}
    return model.generate(padded, attention_mask=mask, **options)[:, longest:]


@pytest.fixture(scope="module")
def undrafted(target: TargetModel, heads: Any) -> Tensor:
    """What the target writes alone."""
    return text(drafting(target, heads, "none"))


def drafting(target: TargetModel, heads: Any, tree: str) -> MedusaModel:
    return MedusaModel(target, heads, tree=tree)


@pytest.mark.parametrize(
    ("trees", "drafters"),
    [
        (["7", "dynamic:12", "auto"], ["recycling", "early_exit:2", "lookahead"]),
        pytest.param(
            ["chain", "static:15", "7+suffix", "suffix"], ["recycling:7", "auto"], marks=SLOW
        ),
    ],
)
def test_what_is_drafted_changes_no_token(
    target: TargetModel, heads: Any, undrafted: Tensor, trees: list[str], drafters: list[str]
) -> None:
    short: dict[str, Any] = {"max_new_tokens": 12}
    plain = undrafted[:, :12]
    for name in trees:
        assert torch.equal(text(drafting(target, heads, name), **short), plain), name
    for name in drafters:
        model = TrainingFreeModel(target, name)
        assert torch.equal(text(model, **short), plain), name
    assert not torch.equal(text(drafting(target, heads, "7"), seed=4, **short), plain)


def test_a_row_writes_among_others_what_it_writes_alone(target: TargetModel, heads: Any) -> None:
    model = drafting(target, heads, "dynamic:7")
    alone = text(model, [OTHER])
    among = text(model, [PROMPT, OTHER, OTHER])
    assert torch.equal(among[1], alone[0])
    assert torch.equal(among[0], text(model)[0])
    assert not torch.equal(among[2], among[1])


def test_a_seed_fixes_the_text_and_the_next_call_writes_another(
    target: TargetModel, heads: Any
) -> None:
    model = drafting(target, heads, "7")
    ids = torch.tensor([PROMPT], device=target.device)
    inputs: Any = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"max_new_tokens": 24, "pad_token_id": 0, **SAMPLING}
    texts: list[Any] = []
    for seeded in (True, False, True):
        if seeded:
            set_seed(3)
        texts.append(model.generate(**inputs))
    assert torch.equal(texts[2], texts[0]) and not torch.equal(texts[1], texts[0])


def test_scores_are_handed_out_and_change_no_draw(target: TargetModel, heads: Any) -> None:
    """Those of the text that was drawn, as the target and its warpers make them."""
    model = drafting(target, heads, "7")
    asked: Any = {"return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(3)
    ids = torch.tensor([PROMPT], device=target.device)
    mask = torch.ones_like(ids)
    options: Any = {"max_new_tokens": 31, "pad_token_id": 0, **SAMPLING, **asked}
    out: Any = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(out.sequences[:, len(PROMPT) :], text(model))
    with torch.no_grad():
        logits_TV = target.model(out.sequences[:, :-1]).logits[0, len(PROMPT) - 1 :]
    scores_TV = TopKLogitsWarper(40)(ids, logits_TV / 0.7)
    torch.testing.assert_close(torch.cat(out.scores), scores_TV, rtol=1e-4, atol=1e-4)


def test_unknown_names_are_refused(target: TargetModel, heads: Any) -> None:
    with pytest.raises(ValueError, match=r"rng must be one of .*, got 'torch'"):
        MedusaModel(target, heads, rng="torch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"acceptance must be one of .*, got 'coupled'"):
        MedusaModel(target, heads, acceptance="coupled")


def test_without_draws_it_is_greedy(target: TargetModel, heads: Any) -> None:
    greedy: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None}
    other = MedusaModel(target, heads, tree="7", rng="transformers")
    assert torch.equal(text(drafting(target, heads, "7"), **greedy), text(other, **greedy))


class _Elsewhere(Noise):
    """Noise of another place than the target's."""

    def of(self, rows: Sequence[Row], ahead: Sequence[int], tokens_BFC: Tensor) -> Tensor:
        return super().of(rows, [far + 1000 for far in ahead], tokens_BFC)


def _misled(ranking: Ranking, state: DecodingState) -> Ranking:
    told: Any = as_drawn(ranking, state)
    wrong = told._coupled._noise = object.__new__(_Elsewhere)
    wrong.__dict__ = vars(state.noise)
    return told


@pytest.mark.parametrize(
    ("tree", "seeds"), [("static:7", [3]), pytest.param("dynamic:7", range(3, 9), marks=SLOW)]
)
def test_drafts_that_know_the_noise_are_accepted_more_often(
    target: TargetModel,
    heads: Any,
    tree: str,
    seeds: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the same texts, than those that do not, and than those that believe another one."""
    prompts = [PROMPT, OTHER, [99, 5, 6, 42]]
    model, texts, tokens_per_step = drafting(target, heads, tree), [], []
    for told in (as_drawn, lambda ranking, state: ranking, _misled):
        monkeypatch.setattr("medusa_heads.inference.drafters.head_trees.as_drawn", told)
        written, speeds = [], []
        for seed in seeds:
            written.append(text(model, prompts, seed, max_new_tokens=48))
            assert model.last_stats is not None
            speeds.append(model.last_stats.tokens_per_step)
        texts.append(torch.stack(written))
        tokens_per_step.append(sum(speeds) / len(speeds))
    assert torch.equal(texts[1], texts[0]) and torch.equal(texts[2], texts[0])
    knowing, unknowing, misled = tokens_per_step
    assert knowing > 1.05 * unknowing
    assert misled < 0.97 * unknowing


@pytest.mark.parametrize("tree", ["chain:4", "sampled:4", "auto"])
def test_a_draft_model_that_says_what_the_target_says_is_never_refused(
    target: TargetModel, undrafted: Tensor, tree: str
) -> None:
    """Though tokens are drawn, who knows the noise and the scores knows the tokens."""
    model = DraftedModel(target, target, tree=tree)
    assert torch.equal(text(model), undrafted)
    if tree != "auto":  # which chooses how deep it drafts
        assert model.last_stats.tokens_per_step > 4.4  # of 5, and the last step ends early


def test_equal_scores_are_drawn_alike_however_large_they_are() -> None:
    """As in half precision at a temperature near 0."""
    logits_1NV = torch.zeros(1, 6, VOCAB)
    logits_1NV[..., :2] = 20.0
    rule = SampleThenMatch(LogitsProcessorList([TemperatureLogitsWarper(1e-6)]), do_sample=True)
    first = 0
    for seed in range(1000):
        rows: list[Row] = [row()]
        rule.noise = Noise(seed, rows, [0])
        rule(tree(1), logits_1NV, rows)
        first += rows[0].tokens[0] == 0
    assert abs(first - 500) < 52  # p = 0.001


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("batch", [1, 2])
def test_scores_that_are_no_distribution_are_refused(wrong: float, batch: int) -> None:
    rows = [row(index=b, batch=batch) for b in range(batch)]
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=True)
    rule.noise = Noise(0, rows, [0] * batch)
    logits_BNV = torch.zeros(batch, 6, VOCAB)
    logits_BNV[-1] = wrong
    said = (
        "^the processed scores of a next token are no distribution: each is -inf, or some are inf "
        "or nan$"
    )
    with pytest.raises(ValueError, match=said):
        rule(tree(batch), logits_BNV, rows)
