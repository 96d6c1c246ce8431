"""One small tree, and rows that walk it.

Shapes: B rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.trees.tree import TokenTree, TreeShape

VOCAB = 12
#   0:5 --- 1:6 --- 2:7 --- 3:8
#      `--- 4:9 --- 5:7
SHAPE = TreeShape.from_choices([(0,), (0, 0), (0, 0, 0), (1,), (1, 0)])


def tree(batch: int = 1) -> TokenTree:
    return SHAPE.tree(torch.tensor([[5, 6, 7, 8, 9, 7]] * batch))


def logits_naming(tokens: list[int]) -> Tensor:
    """[1, N, V]: node i's most likely token is tokens[i]."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), VOCAB).float() * 20


def row(max_length: int = 100, eos: int | None = None, index: int = 0, batch: int = 1) -> Row:
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    return Row(index, batch, torch.tensor([1, 2, 5]), StopCheck(criteria, batch))
