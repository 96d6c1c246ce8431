"""Acceptance without a walk: what the target writes behind every node, and the deepest node all of
whose ancestors it would have written. The host is asked nothing.

Shapes: B rows, N tree nodes, A = one more than the levels of the tree, V vocabulary.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import greediest, is_penalty, warp
from medusa_heads.inference.acceptance.narrowed import LEFT_OUT, Narrowed
from medusa_heads.inference.engine.noise import NoiseOnDevice
from medusa_heads.machine.devices import has_float64
from medusa_heads.trees.tree import TokenTree


class PenaltyOnDevice:
    """transformers' repetition penalty, by which tokens have been seen in place of the text; a last
    column is of ids beyond the vocabulary."""

    def __init__(self) -> None:
        self.penalty: Any = 1.0  # until one is taken
        self.inverse: Any = 1.0

    def __call__(self, seen_RV: Tensor, scores_RV: Tensor) -> Tensor:
        # By a number of the host, torch divides so on a GPU, and ties depend on it.
        lower_RV = scores_RV * self.inverse if scores_RV.is_cuda else scores_RV / self.penalty
        less_RV = (scores_RV * self.penalty).where(scores_RV < 0, lower_RV)
        return less_RV.where(seen_RV[:, :-1], scores_RV)


class ProcessorsOnDevice:
    """Copies of processors that look at tokens alone, with tensors in place of the numbers that
    they compute with, such as a temperature: one graph then serves all of these.

    Args:
        like: such processors.

    Attributes:
        copies: which compute as those that were taken last; those that look at the text are given
            the tokens that have been seen.
        look_at_text: whether any does.
    """

    def __init__(self, like: LogitsProcessorList, device: torch.device) -> None:
        self.copies = LogitsProcessorList(
            PenaltyOnDevice() if is_penalty(each) else copy(each) for each in like
        )
        self.look_at_text = any(isinstance(each, PenaltyOnDevice) for each in self.copies)
        for processor in self.copies:
            for name, number in _numbers(processor).items():
                # In double precision, of which those of the host are rounded as well.
                wide = torch.double if has_float64(device) else torch.float
                dtype = number.dtype if isinstance(number, Tensor) else wide
                with torch.inference_mode(False):
                    made = torch.zeros((), dtype=dtype, device=device)
                torch._dynamo.mark_static_address(made)
                setattr(processor, name, made)

    def take(self, processors: LogitsProcessorList) -> None:
        """The numbers of these, which are of the same kinds."""
        for mine, theirs in zip(self.copies, processors, strict=True):
            for name, number in _numbers(theirs).items():
                getattr(mine, name).fill_(number)


def kinds(processors: LogitsProcessorList) -> tuple[Any, ...]:
    """All of such processors that is no number which they compute with, such as a `top_k`, by which
    shapes go."""
    return tuple(
        (type(processor),)
        if is_penalty(processor)
        else (type(processor), *sorted(vars(processor).items() - _numbers(processor).items()))
        for processor in processors
    )


def _numbers(processor: Any) -> dict[str, float | Tensor]:
    if is_penalty(processor):  # what it leaves out of a text has not been seen
        penalty = torch.tensor(processor.penalty, dtype=torch.float)  # as scores are
        return {"penalty": processor.penalty, "inverse": float(1.0 / penalty)}
    # What takes the place of a score is no tensor: a GPU's host would have to read it first.
    return {
        name: number
        for name, number in vars(processor).items()
        if isinstance(number, float | Tensor) and name != "filter_value"
    }


def draw_all(
    tree: TokenTree,
    logits_BNV: Tensor,
    processors: LogitsProcessorList,
    noise: NoiseOnDevice | None,
    seen_BV: Tensor | None = None,
) -> Tensor:
    """The target's next token [B, N] behind every node, by processors on the device; the likeliest
    where there is no noise. NO_TOKEN where the processed scores are no distribution. `seen_BV`
    tells which tokens are in each row's text, where any processor asks, and in one more column
    whether ids beyond the vocabulary are. LEFT_OUT behind nodes that no path is to go through.
    """
    if noise is None and not processors:
        return greediest(logits_BNV)
    seen_RV = None if seen_BV is None else _seen_behind(tree, seen_BV).flatten(0, 1)
    if noise is not None and (narrowed := Narrowed.of(processors, *logits_BNV.shape)):
        return narrowed.draw_all(logits_BNV, tree.depth_BN, noise, seen_RV)
    scores_BNV = warp(processors, seen_RV, logits_BNV.float().flatten(0, 1)).view_as(logits_BNV)
    if noise is None:
        return scores_BNV.argmax(dim=-1)
    return noise.draw_all(scores_BNV, tree.depth_BN)


def _seen_behind(tree: TokenTree, seen_BV: Tensor) -> Tensor:
    """Which tokens are in the text behind each node, [B, N, V + 1]: also those on its path."""
    every_B1N = tree.tokens_BN[:, None].clamp_max(seen_BV.shape[1] - 1)
    path_BNN = every_B1N.where(tree.ancestors_BNN, every_B1N[..., :1])  # the root's has been seen
    return seen_BV[:, None].repeat(1, tree.num_nodes, 1).scatter(2, path_BNN, True)


class DeepestPath(NamedTuple):
    """Of every row the accepted path, as a walk would find it."""

    nodes_BA: Tensor  # its nodes, node 0 first; 0 behind its end
    tokens_BA: Tensor  # what the target says behind each: the path's tokens and the bonus token
    length_B1: Tensor  # nodes of the path, and as many tokens


def deepest_path(tree: TokenTree, drawn_BN: Tensor, levels: int) -> DeepestPath:
    """Where all nodes were verified, and `drawn_BN` is the target's next token behind each. Of
    siblings no two carry one token, and no node but the first is a root."""
    right_BN = tree.tokens_BN == drawn_BN.gather(1, tree.parents_BN.clamp_min(0))
    right_BN = right_BN & (drawn_BN != LEFT_OUT)
    right_BN = right_BN | (tree.depth_BN == 0)
    reached_BN = ~(~right_BN[:, None] & tree.ancestors_BNN).any(dim=-1)
    depth_B1, last_B1 = tree.depth_BN.where(reached_BN, -1).max(dim=1, keepdim=True)
    nodes = tree.num_nodes
    on_path_BN = tree.ancestors_BNN.gather(1, last_B1[:, :, None].expand(-1, -1, nodes))[:, 0]
    # What is not on the path is written behind the last column, which is left out.
    column_BN = tree.depth_BN.where(on_path_BN, levels + 1)
    numbers_BN = torch.arange(nodes, device=drawn_BN.device).expand_as(column_BN)
    nodes_BA = torch.zeros_like(column_BN[:, :1]).repeat(1, levels + 2)
    nodes_BA = nodes_BA.scatter(1, column_BN, numbers_BN)[:, : levels + 1]
    return DeepestPath(nodes_BA, drawn_BN.gather(1, nodes_BA), depth_B1 + 1)
