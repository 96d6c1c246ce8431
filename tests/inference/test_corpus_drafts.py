"""Drafts that continue a corpus: the text stays the target's, whatever the corpus says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import MedusaModel
from medusa_heads.inference import training_free
from medusa_heads.inference.corpus_index import CorpusIndex
from medusa_heads.inference.drafters.suffix import SuffixDrafter
from medusa_heads.inference.exit_costs import ExitCosts
from medusa_heads.inference.state import DecodingState
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.inference.training_free import TrainingFreeModel
from medusa_heads.statistics import HeadStatistics
from medusa_heads.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import Misremembering
from tests.inference.rereading import random_heads

DRAFTERS = ("suffix", "auto", "lookahead+suffix", "early_exit+suffix")
COSTS = {0: 1.0, 3: 1.02, 7: 1.05, 15: 1.1, 31: 1.3}
NEW = 60


@pytest.fixture(autouse=True)
def cheap_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Costs of a machine on which many nodes pay, as they do not on a model this small."""
    monkeypatch.setattr(training_free, "target_costs", lambda *_: StepCosts(COSTS))
    exits = ExitCosts(draft=0.05, verify=COSTS)
    monkeypatch.setattr(training_free, "exit_costs", lambda *_: exits)
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path))


def scattered(text: list[int]) -> list[list[int]]:
    """A corpus that holds most of a text, in pieces between which it is wrong."""
    pieces = [text[start : start + 14] for start in range(0, len(text), 16)]
    return [[*piece, 5, 5] for piece in pieces] + [[6, 7, 8]]


def seeded(generate: Any, ids_BT: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(3)
    made: Tensor = generate(ids_BT, max_new_tokens=NEW, **options)
    return made


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7, "top_k": 0},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    ],
    ids=str,
)
def test_equals_generate(tiny_llama: TinyLlama, drafter: str, options: dict[str, Any]) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7, 8]], device=DEVICE)
    expected_BT = seeded(model.generate, ids_BT, **options)
    corpus = scattered(expected_BT[0].tolist())
    with_corpus = TrainingFreeModel(model, drafter, corpus=corpus)
    assert torch.equal(seeded(with_corpus.generate, ids_BT, **options), expected_BT)
    without = TrainingFreeModel(model, drafter)
    seeded(without.generate, ids_BT, **options)
    assert with_corpus.last_stats.tokens_per_step > 1.3 * without.last_stats.tokens_per_step


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_of_a_batch_equal_generate(tiny_llama: TinyLlama, drafter: str) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    ids_BT = torch.randint(3, 24, (5, 10), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    starts_B1 = torch.tensor([[0], [3], [7], [1], [5]])
    mask_BT = (torch.arange(10) >= starts_B1).long().to(DEVICE)
    options: dict[str, Any] = {"attention_mask": mask_BT, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": 2}
    expected_BT = seeded(model.generate, ids_BT, **options)
    corpus = [piece for row in expected_BT.tolist() for piece in scattered(row)]
    drafted = TrainingFreeModel(model, drafter, corpus=corpus)
    assert torch.equal(seeded(drafted.generate, ids_BT, **options), expected_BT)
    assert drafted.last_stats.tokens_per_step > 1.5


def test_a_wrong_mask_is_caught(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7, 8]], device=DEVICE)
    expected_BT = seeded(model.generate, ids_BT, do_sample=False)
    index = CorpusIndex.build(scattered(expected_BT[0].tolist()))
    drafted = TrainingFreeModel(model, "suffix", corpus=index)
    for kind, same in ((SuffixDrafter, True), (Misremembering, False)):
        drafted._by_rows[1] = kind(StepCosts(COSTS), index)
        got_BT = seeded(drafted.generate, ids_BT, do_sample=False)
        assert torch.equal(got_BT, expected_BT) == same


class Counting(SuffixDrafter):
    """Counts the nodes it proposes."""

    nodes: list[int]

    def propose(self, state: DecodingState) -> TokenTree:
        tree = super().propose(state)
        self.nodes.append(tree.num_nodes - 1)
        return tree


def test_a_useless_corpus_is_soon_left_alone(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7, 8]], device=DEVICE)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0}
    text = seeded(model.generate, ids_BT, **options)[0].tolist()
    wrong = [[token, (token + 7) % 199, 3, 4, 5, 6, 7, 8] for token in text]
    nodes = []
    for index in (CorpusIndex.build(wrong), None):
        drafted = TrainingFreeModel(model, "suffix")
        drafter = drafted._by_rows[1] = Counting(StepCosts({0: 1.0, 3: 1.2, 7: 1.5}), index)
        drafter.nodes = []
        assert seeded(drafted.generate, ids_BT, **options)[0].tolist() == text
        nodes.append(drafter.nodes)
    with_corpus, without = nodes
    assert sum(with_corpus[:4]) > sum(without[:4]) and with_corpus[15:] == without[15:]


@pytest.mark.parametrize("tree", ["auto", "7+suffix", "suffix:4"])
def test_beside_heads(tiny_llama: TinyLlama, tree: str) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ranks_SK = torch.randint(4, (300, 3), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"statistics": HeadStatistics.from_ranks(ranks_SK), "tree": tree}
    ids_BT = torch.tensor([[5, 17, 3, 5, 17, 3, 5]], device=DEVICE)
    expected_BT = seeded(model.generate, ids_BT, do_sample=False)
    corpus = scattered(expected_BT[0].tolist())
    medusa = MedusaModel(model, random_heads(model), corpus=corpus, **options)
    assert torch.equal(seeded(medusa.generate, ids_BT, do_sample=False), expected_BT)
    if tree != "auto":  # which may find on this machine that nothing pays
        assert medusa.last_stats.tokens_per_step > 1.5


@pytest.mark.parametrize("tree", ["chain", 7, "dynamic:4", [[0]], "none"])
def test_trees_that_continue_nothing(tiny_llama: TinyLlama, tree: Any) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"a corpus is continued by the trees auto, N\+suffix and"):
        MedusaModel(model, random_heads(model), tree=tree, corpus=[[1, 2]])


@pytest.mark.parametrize("drafter", ["recycling", "lookahead", "early_exit", "early_exit:1"])
def test_drafters_that_continue_nothing(tiny_llama: TinyLlama, drafter: str) -> None:
    with pytest.raises(ValueError, match="a corpus is continued by the drafters auto, suffix and"):
        TrainingFreeModel(tiny_llama(), drafter, corpus=[[1, 2]])


def test_another_vocabulary(tiny_llama: TinyLlama) -> None:
    with pytest.raises(ValueError, match="token ids up to 199, and the target has 199"):
        TrainingFreeModel(tiny_llama(), corpus=[[1, 199]])
