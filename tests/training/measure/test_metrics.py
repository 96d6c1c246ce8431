"""Figures out of ranks, on ranks written by hand."""

import torch

from medusa_heads.training.measure.metrics import (
    accepted_text,
    chain_metrics,
    chain_tree,
    describe,
    rank_metrics,
)


def test_heads_that_are_always_right_commit_every_head_and_the_targets_own_token() -> None:
    metrics = rank_metrics(torch.zeros(2, 12, 3, dtype=torch.long))
    assert metrics["head2_top1"] == metrics["head0_top5"] == 1
    assert metrics["tokens_per_step_16"] == metrics["tokens_per_step_32"] == 4
    assert metrics["head0_accepted"] == metrics["head2_accepted"] == 1


class Letters:
    @staticmethod
    def batch_decode(parts: list[list[int]]) -> list[str]:
        return ["".join(chr(97 + token) for token in part) for part in parts]


def test_a_text_shows_what_each_step_commits() -> None:
    labels_BT = torch.tensor([[-100, *range(7)]])
    none = [-100, -100]
    ranks_BTK = torch.tensor([[[0, 9], none, [0, 0], [0, 9], [9, 9], [9, 0], none, none]])
    ranks_BTK[0, 1] = torch.tensor([0, 0])
    tree = [(0,), (0, 0)]
    # a is known; steps begin at 0, 2 and 5.
    assert accepted_text(ranks_BTK, labels_BT, tree, Letters()) == "a|bc|def|g"
    figures = chain_metrics(ranks_BTK)
    assert figures["head0_accepted"] == 2 / 3 and figures["head1_accepted"] == 1 / 2


def test_a_text_too_short_for_the_last_head_shows_what_the_first_ones_commit() -> None:
    labels_BT = torch.tensor([[-100, *range(4)]])
    ranks_BTK = torch.full((1, 5, 6), -100)
    assert accepted_text(ranks_BTK, labels_BT, chain_tree(ranks_BTK), Letters()) == ""
    for t in range(4):
        ranks_BTK[0, t, : 3 - t] = 0
    assert accepted_text(ranks_BTK, labels_BT, chain_tree(ranks_BTK), Letters()) == "a|bcd"


def test_the_line_says_what_was_measured() -> None:
    # Head 0 is right at every second position: there a step commits two tokens and moves on to the
    # next such position, so every step does.
    ranks_BTK = torch.tensor([[[0], [20]] * 4])
    metrics = {f"eval_{name}": value for name, value in rank_metrics(ranks_BTK).items()}
    assert describe(metrics) == (
        "held-out top-1 0.500 | top-5 0.500 | "
        "tokens per step 2.00 with 16 nodes, 2.00 with 32 nodes"
    )
