"""Heads' drafts and the text's own in one tree: the text stays the target's, whoever is asked."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import MedusaModel, TargetModel
from medusa_heads.inference.continuation import Continuation
from medusa_heads.inference.drafters.blended import BlendedDrafter, Rest
from medusa_heads.inference.drafters.growing import TensorTrees
from medusa_heads.inference.drafters.suffix import SuffixDrafter
from medusa_heads.inference.drafters.trust import Belief, SuffixTrust, TreeTrust
from medusa_heads.inference.engine import decode
from medusa_heads.inference.stats import GenerationStats
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.prefix_tree import PrefixTree
from medusa_heads.statistics import HeadStatistics
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import BUSHY, Misremembering, PlantedDrafter
from tests.inference.rereading import RereadingDrafter, random_heads, run

COSTS = {0: 1.0, 1: 1.05, 3: 1.1, 7: 1.2, 15: 1.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0},
}


class SometimesAsked(StepCosts):
    """Asks the base by chance, so that all ways of going on are gone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chance = random.Random(0)
        self.asked = [0, 0]

    def worth_asking(self, *_: Any) -> tuple[bool, float]:
        asks = self.chance.random() < 0.5
        self.asked[asks] += 1
        return asks, 1.0


def chances(share: float = 0.6) -> list[float]:
    return [share ** len(path) / 3 for path in BUSHY]


def generate(model: Any, drafter: Any, inputs: dict[str, Any]) -> tuple[Tensor, GenerationStats]:
    stats, target = GenerationStats(), TargetModel(model)

    def custom(_model: Any, input_ids: Tensor, synced_gpus: bool = False, **kwargs: Any) -> Any:
        return decode(target, drafter, input_ids, stats=stats, **kwargs)

    torch.manual_seed(7)
    return model.generate(**inputs, custom_generate=custom), stats


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_row_equals_generate(tiny_llama: TinyLlama, options: dict[str, Any]) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.randint(199, (1, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}
    inputs |= options | {"max_new_tokens": 90}
    torch.manual_seed(7)
    expected_BT = model.generate(**inputs)
    base = PlantedDrafter(expected_BT[:, 12:].tolist(), 199)
    costs = SometimesAsked(COSTS)
    got_BT, stats = generate(model, BlendedDrafter(TensorTrees(base, chances()), costs), inputs)
    assert torch.equal(got_BT, expected_BT)
    assert min(costs.asked) > 5 and stats.tokens_per_step > 1.1


def test_rows_of_a_batch_equal_generate(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    ids_BT = torch.randint(3, 24, (4, 10), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask_BT = (torch.arange(10, device=DEVICE) >= torch.tensor([[0], [3], [7], [1]])).long()
    inputs = {"input_ids": ids_BT, "attention_mask": mask_BT, "do_sample": False}
    inputs |= {"max_new_tokens": 80, "eos_token_id": 2, "pad_token_id": 0}
    expected_BT = model.generate(**inputs)
    references = expected_BT[:, 10:].tolist()
    for drafter in (
        BlendedDrafter(
            TensorTrees(PlantedDrafter(references, 24), chances()), SometimesAsked(COSTS)
        ),
        SuffixDrafter(StepCosts(COSTS)),
        SuffixDrafter(StepCosts.of_size(6, fixed=True)),
    ):
        got_BT, stats = generate(model, drafter, inputs)
        assert torch.equal(got_BT, expected_BT)
        assert stats.tokens_per_step > 1.2


def test_a_wrong_mask_is_caught(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]], device=DEVICE)
    inputs = {"input_ids": ids_BT, "do_sample": False, "max_new_tokens": 60}
    expected_BT = model.generate(**inputs)
    assert not torch.equal(
        generate(model, Misremembering(StepCosts(COSTS)), inputs)[0], expected_BT
    )
    assert torch.equal(generate(model, SuffixDrafter(StepCosts(COSTS)), inputs)[0], expected_BT)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_that_are_asked_now_and_then_have_read_everything(
    tiny_llama: TinyLlama, kind: str
) -> None:
    model: Any = tiny_llama().to(DEVICE)
    heads = random_heads(model, kind=kind, prefix_attention=True)
    target = TargetModel(model)
    ids_BT = torch.randint(199, (3, 9), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :4] = 0
    options: dict[str, Any] = {"attention_mask": mask_BT, "max_new_tokens": 90, "do_sample": False}
    expected_BT = model.generate(ids_BT, **options, pad_token_id=0)
    references = expected_BT[:, 9:].tolist()
    options |= {"eos_token_id": references[2][40], "pad_token_id": 0}
    base, costs = RereadingDrafter(heads, target, references, 199), SometimesAsked(COSTS)
    drafter = BlendedDrafter(TensorTrees(base, chances()), costs)
    with torch.no_grad():
        got_BT = model.generate(ids_BT, **options, custom_generate=partial(run, target, drafter))
    assert torch.equal(got_BT, model.generate(ids_BT, **options))
    assert base.compared > 8 and min(costs.asked) > 4


@pytest.mark.parametrize(
    "tree", ["auto", "7+suffix", "dynamic:7+suffix", "chain:2+suffix", "suffix:4"]
)
def test_by_the_words_of_a_tree(tiny_llama: TinyLlama, tree: str) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ranks_SK = torch.randint(4, (300, 3), generator=torch.Generator().manual_seed(0))
    statistics = HeadStatistics.from_ranks(ranks_SK)
    medusa = MedusaModel(model, random_heads(model), statistics=statistics, tree=tree)
    assert medusa.tree == tree
    ids_BT = torch.tensor([[5, 17, 3, 5, 17, 3, 5]], device=DEVICE)
    options = {"max_new_tokens": 60, "do_sample": False}
    assert torch.equal(medusa.generate(ids_BT, **options), model.generate(ids_BT, **options))  # type: ignore[arg-type]


def test_words_that_need_statistics_say_so(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama()
    heads = random_heads(model)
    with pytest.raises(ValueError, match="'8\\+suffix' needs heads with statistics"):
        MedusaModel(model, heads, tree="8+suffix")
    statistics = HeadStatistics.from_ranks(torch.zeros(9, 3, dtype=torch.long))
    for tree in ("none+suffix", "suffix+suffix"):
        with pytest.raises(ValueError, match="leaves the heads nothing to draft"):
            MedusaModel(model, heads, statistics=statistics, tree=tree)


def test_a_match_is_believed_as_far_as_it_was_right() -> None:
    trust, found = SuffixTrust(), Continuation(5, [1, 2, 3], [1.0] * 3)
    before = trust.chances(found)
    assert before == sorted(before, reverse=True) and 0 < before[2] < 1
    for _ in range(20):
        trust.learn(found, [1, 2, 3])
    assert trust.chances(found)[0] > before[0]
    for _ in range(40):
        trust.learn(found, [9])
    assert trust.chances(found)[0] < before[0]
    longer = Continuation(40, [1], [1.0])
    assert trust.chances(longer) == SuffixTrust().chances(longer)  # other lengths learnt nothing


def test_a_token_is_believed_by_its_share_of_the_occurrences() -> None:
    trust, found = SuffixTrust(), Continuation(1, [7], [0.25])
    for place in range(400):
        trust.learn(found, [7 if place % 4 == 0 else 8])
    assert trust.chances(found)[0] == pytest.approx(0.25, abs=0.05)
    assert trust.chances(found._replace(shares=[0.5]))[0] == pytest.approx(0.5, abs=0.1)
    assert max(trust.chances(found._replace(shares=[1.0]))) <= 1.0


def test_trees_are_believed_as_far_as_they_were_right() -> None:
    tree, trust = PrefixTree(0), TreeTrust()
    tree.add_path([1, 2], [0.8, 0.4])
    tree.add(0, 3, 0.1)
    assert trust.factors(2) == [1.0, 1.0, 1.0]
    for _ in range(300):
        trust.learn(tree, [9])  # promised 0.9 at depth 1, and held nothing
    factors = trust.factors(2)
    assert factors[1] < 0.2 and factors[2] == pytest.approx(factors[1])
    for _ in range(700):
        trust.forgive()
    assert trust.factors(1)[1] > 0.8
    for _ in range(300):
        trust.learn(tree, [1, 2, 5])  # depth 2 promised 0.4 / 0.8, and was always right
    assert trust.factors(2)[2] / trust.factors(2)[1] == pytest.approx(2.0, rel=0.1)


def test_promises_are_believed_as_far_as_they_were_kept() -> None:
    belief = Belief()
    assert belief.factor == 1
    for _ in range(200):
        belief.learn(promised=2.0, accepted=1)
    assert belief.factor == pytest.approx(0.5, abs=0.05)
    for _ in range(800):
        belief.forgive()
    assert belief.factor > 0.9
    belief.learn(promised=1.0, accepted=30)
    assert belief.factor == 1


def test_rests_longer_the_longer_nothing_pays() -> None:
    rest, thought = Rest(), []
    for step in range(130):
        if not rest.goes_on():
            thought.append(step)
            rest.after(drafted=step == 0)
    assert thought == [0, 1, 3, 7, 15, 31, 63, 95, 127]
