"""Acceptance without a walk: the deepest node all of whose ancestors the target would have written.

Shapes: B rows, N tree nodes, A = one more than the levels of the tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medusa_heads.trees.tree import TokenTree


class DeepestPath(NamedTuple):
    """Of every row the accepted path, as a walk would find it.

    Attributes:
        nodes_BA: its nodes, node 0 first; 0 behind its end.
        tokens_BA: what the target says behind each: the path's tokens and the bonus token.
        length_B1: nodes of the path, and as many tokens.
    """

    nodes_BA: Tensor
    tokens_BA: Tensor
    length_B1: Tensor


def deepest_path(tree: TokenTree, drawn_BN: Tensor, levels: int) -> DeepestPath:
    """Where all nodes were verified, and `drawn_BN` is the target's next token behind each. Of
    siblings no two carry one token, and no node but the first is a root."""
    right_BN = tree.tokens_BN == drawn_BN.gather(1, tree.parents_BN.clamp_min(0))
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
