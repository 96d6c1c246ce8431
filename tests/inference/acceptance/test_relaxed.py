"""Lossy rules: what they let through, by hand; and that they say they are lossy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.inference.acceptance import RULES, make_rule
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.trees.tree import TokenTree, TreeShape
from tests.conftest import TinyLlama

VOCAB = 10
#   0:5 --- 1:6 --- 2:7
#      `--- 3:8 --- 4:9
SHAPE = TreeShape.from_choices([(0,), (0, 0), (1,), (1, 0)])


def tree(log_q: float = math.log(0.5)) -> TokenTree:
    return SHAPE.tree(torch.tensor([[5, 6, 7, 8, 9]]), torch.full((1, 5), log_q))


def target_logits(after_root: dict[int, float], after_6: dict[int, float]) -> Tensor:
    """[1, N, V]: given probabilities after node 0 and node 1, the rest of the mass on token 0;
    after every other node token 1 is certain."""
    probs_1NV = torch.full((1, 5, VOCAB), 1e-9)
    probs_1NV[0, 2:, 1] = 1.0
    for node, given in ((0, after_root), (1, after_6)):
        for token, probability in given.items():
            probs_1NV[0, node, token] = probability
        probs_1NV[0, node, 0] = 1 - sum(given.values())
    return probs_1NV.log()


def run(name: str, logits: Tensor, eos: int | None = None, **settings: float) -> tuple[Any, Any]:
    criteria = StoppingCriteriaList([] if eos is None else [EosTokenCriteria(eos)])
    row = Row(0, 1, torch.tensor([5]), StopCheck(criteria))
    rule = make_rule(name, LogitsProcessorList(), do_sample=False, **settings)
    (path,) = rule(tree(), logits, [row])
    return path, row.tokens


def test_typical_lets_an_uncertain_target_take_less_likely_tokens() -> None:
    # After the root the target holds 6 at 0.2 of 1: above min(0.09, ...), so accepted although
    # token 0 is likelier; after 6, token 7 at 0.02 is below the limit of a certain distribution.
    logits = target_logits({6: 0.2}, {7: 0.02})
    assert run("typical", logits, epsilon=0.09, delta=0.3) == ([0, 1], [6, 0])
    assert run("typical", logits, epsilon=0.01, delta=0.3) == ([0, 1, 2], [6, 7, 1])
    assert run("typical", logits, epsilon=0.5, delta=0.9) == ([0], [0])


def test_threshold_compares_with_the_draft() -> None:
    # Drafted with probability 0.5; the target gives 0.2 and then 0.05.
    logits = target_logits({6: 0.2}, {7: 0.05})
    assert run("threshold", logits, threshold=0.3) == ([0, 1], [6, 0])
    assert run("threshold", logits, threshold=0.09) == ([0, 1, 2], [6, 7, 1])
    assert run("threshold", logits, threshold=0.5) == ([0], [0])


def test_log_ratio_adds_up_along_the_path() -> None:
    logits = target_logits({6: 0.2}, {7: 0.2})  # each step costs log(0.5 / 0.2) = 0.916
    assert run("log_ratio", logits, tau=1.0) == ([0, 1], [6, 0])
    assert run("log_ratio", logits, tau=2.0) == ([0, 1, 2], [6, 7, 1])


def test_the_deepest_path_wins_then_the_likeliest() -> None:
    logits = target_logits({6: 0.3, 8: 0.4}, {7: 0.01})
    path, tokens = run("typical", logits)  # both at depth one, 8 likelier; 9 after 8 is not
    assert (path, tokens) == ([0, 3], [8, 1])
    deeper = target_logits({6: 0.3, 8: 0.4}, {7: 0.5})
    assert run("typical", deeper) == ([0, 1, 2], [6, 7, 1])


def test_an_end_token_inside_the_path_ends_it() -> None:
    logits = target_logits({6: 0.5}, {7: 0.6})
    assert run("typical", logits, eos=6) == ([0], [6])


def test_only_lossless_says_lossless() -> None:
    for name, rule in RULES.items():
        assert rule.lossless is (name == "lossless")
        assert rule.lossless or "LOSSY" in (rule.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("greedy", {}, "acceptance must be one of"),
        ("typical", {"tau": 1.0}, "typical acceptance has no setting 'tau': log_ratio acceptance"),
        ("lossless", {"epsilon": 0.1}, "no setting 'epsilon': typical acceptance has it"),
        ("typical", {"nonsense": 1.0}, "no setting 'nonsense': leave it out"),
        ("typical", {"epsilon": 2.0}, "epsilon must be above 0"),
        ("threshold", {"threshold": 0.0}, "threshold must be above 0"),
    ],
)
def test_bad_settings_are_refused(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rule(name, LogitsProcessorList(), False, **settings)


def test_processors_that_read_the_text_are_refused() -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    make_rule("typical", warpers, True)
    warpers.append(RepetitionPenaltyLogitsProcessor(1.2))
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor"):
        make_rule("typical", warpers, True)


@pytest.mark.parametrize("name", sorted(set(RULES) - {"lossless"}))
@pytest.mark.parametrize("batch", [1, 3])
def test_generation_end_to_end(tiny_llama: TinyLlama, name: str, batch: int) -> None:
    model = tiny_llama(vocab_size=24)
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=3))
    exact = MedusaModel(model, heads, tree="cartesian:3,2,1")
    lossy = MedusaModel(model, heads, tree="cartesian:3,2,1", acceptance=name)
    ids = torch.arange(3, 15).repeat(batch, 1)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for medusa in (exact, lossy):
        out: Any = medusa.generate(**inputs, max_new_tokens=40, do_sample=False)
        assert out.shape == (batch, 52)
    assert exact.last_stats.lossless and not lossy.last_stats.lossless
    assert lossy.last_stats.tokens_per_step > exact.last_stats.tokens_per_step
