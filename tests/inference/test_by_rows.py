"""Batches under `auto`: a tree for every number of active rows, and the text of each row kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.inference import heads_plan
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.by_rows import ByRowsDrafter, rounded_up
from medusa_heads.inference.tree_plan import make_drafter
from medusa_heads.inference.tree_size import TreeSize, fastest, tune
from medusa_heads.statistics import HeadStatistics
from tests.conftest import TinyLlama


@pytest.fixture
def statistics() -> HeadStatistics:
    ranks_SK = torch.randint(6, (500, 3), generator=torch.Generator().manual_seed(0))
    return HeadStatistics.from_ranks(ranks_SK)


def test_rounded_up() -> None:
    assert [rounded_up(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]


def test_each_number_of_rows_has_its_own_tree(
    tiny_llama: TinyLlama, statistics: HeadStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def blended(_tree: str, _target: Any, heads: Any, *_: Any, **options: Any) -> Drafter:
        batch_size = options["batch_size"]
        asked.append(batch_size)
        tree = {1: "static:15", 2: "dynamic:7", 4: "none", 8: "static:3"}[batch_size]
        return make_drafter(tree, heads, statistics)

    monkeypatch.setattr(heads_plan, "blended", blended)
    plain: Any = tiny_llama(vocab_size=24)
    heads = MedusaHeads.from_target(plain, HeadsConfig(num_heads=3))
    medusa = MedusaModel(plain, heads, statistics=statistics)
    assert asked == [1] and medusa.drafter.num_nodes == 16

    nodes: list[tuple[int, int]] = []
    propose = ByRowsDrafter.propose

    def watched(self: ByRowsDrafter, state: Any) -> Any:
        tree = propose(self, state)
        nodes.append((len(state.rows), tree.num_nodes))
        return tree

    monkeypatch.setattr(ByRowsDrafter, "propose", watched)
    lengths = [12, 3, 9, 12, 5, 7]
    random = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(3, 24, (6, 12), generator=random)
    mask_BT = (torch.arange(12) >= 12 - torch.tensor(lengths)[:, None]).long()
    batch = {"input_ids": ids_BT, "attention_mask": mask_BT, "pad_token_id": 0}
    batch |= {"do_sample": False, "max_new_tokens": 40}
    assert torch.equal(medusa.generate(**batch), plain.generate(**batch))  # type: ignore[arg-type]
    assert set(asked) == {1, 2, 4, 8}
    expected = {1: 16, 2: 8, 3: 1, 4: 1, 5: 4, 6: 4}
    assert all(expected[rows] == count for rows, count in nodes)
    assert len({rows for rows, _ in nodes}) > 2  # rows did leave one by one

    before = len(asked)
    medusa.generate(**batch)  # type: ignore[arg-type]
    assert len(asked) == before  # chosen once
    medusa.use_tree(5)
    assert torch.equal(medusa.generate(**batch), plain.generate(**batch))  # type: ignore[arg-type]
    assert len(asked) == before and medusa.last_stats.tokens == 6 * 40


def test_large_batches_are_measured_with_small_trees_alone(
    tiny_llama: TinyLlama,
    statistics: HeadStatistics,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path))
    model: Any = tiny_llama(vocab_size=24)
    medusa = MedusaModel(model, MedusaHeads.from_target(model, HeadsConfig(num_heads=3)), tree=1)
    sizes: list[TreeSize] = tune(medusa.target, medusa.heads, statistics, context=4, batch_size=200)
    assert [size.tree for size in sizes] == ["none", "static:1", "static:3"]
    sizes = tune(medusa.target, medusa.heads, statistics, context=4, batch_size=2000)
    assert [size.tree for size in sizes] == ["none"]


def test_fastest_is_the_smallest_of_equals_and_knows_of_last_rows() -> None:
    sizes = [
        TreeSize("none", 1.0, 1.0),
        TreeSize("static:3", 1.3, 1.5),  # 1.154 tokens a second
        TreeSize("dynamic:4", 1.0, 1.29),
        TreeSize("static:7", 1.0, 1.3),
        TreeSize("static:15", 1.5, 1.96),  # 1.307, less than a hundredth more
    ]
    assert fastest(sizes).tree == "dynamic:4"
    assert fastest(sizes[3:]).tree == "static:7"
    assert fastest(sizes, 2).tree == "dynamic:4"
    assert fastest(sizes, 8).tree == "none"  # a gain of 1.3 does not outweigh the last row
    assert fastest([*sizes, TreeSize("static:31", 1.0, 1.5)], 8).tree == "static:31"
