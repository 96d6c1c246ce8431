"""How much each pair counts: against sums written out by hand."""

import math

import torch

from medusa_heads.training.loss.heads import acceptance_weights, decay_weights


def test_decay_falls_from_head_to_head() -> None:
    supervised_RK = torch.tensor([[True, True, True], [True, False, True]])
    expected = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.0, 0.25]])
    torch.testing.assert_close(decay_weights(supervised_RK, 0.5), expected)


def test_acceptance_weights_are_the_draft_length_that_hangs_on_a_pair() -> None:
    # Confidence 0.6, 0.2 and 1 become 0.8, 0.6 and 1: reached with 0.8, 0.48 and 0.48.
    log_true_RK = torch.tensor([[0.6, 0.2, 1.0]]).log()
    weights_RK = acceptance_weights(log_true_RK, torch.ones(1, 3, dtype=torch.bool), 0.5)
    torch.testing.assert_close(weights_RK, torch.tensor([[1.76, 0.96, 0.48]]))


def test_pairs_without_a_label_neither_stop_a_draft_nor_lengthen_it() -> None:
    log_true_RK = torch.tensor([[0.6, 0.2, 1.0]]).log()
    supervised_RK = torch.tensor([[True, False, True]])
    weights_RK = acceptance_weights(log_true_RK, supervised_RK, 0.5)
    torch.testing.assert_close(weights_RK, torch.tensor([[1.6, 0.0, 0.8]]))


def test_a_token_that_cannot_be_drafted_ends_the_draft_but_for_the_smoothing() -> None:
    log_true_RK = torch.tensor([[-math.inf, 0.0]])
    weights_RK = acceptance_weights(log_true_RK, torch.ones(1, 2, dtype=torch.bool), 0.25)
    torch.testing.assert_close(weights_RK, torch.tensor([[0.5, 0.25]]))


def test_the_weights_have_no_gradient() -> None:
    log_true_RK = torch.zeros(2, 2, requires_grad=True)
    supervised_RK = torch.ones(2, 2, dtype=torch.bool)
    assert not acceptance_weights(log_true_RK, supervised_RK, 0.5).requires_grad
