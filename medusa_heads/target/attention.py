"""The tree attention mask, handed to unmodified transformers models.

Models build their masks by calling `ALL_MASK_ATTENTION_FUNCTIONS[implementation]` with the rule of
each layer (causal, sliding window, chunked). The two entries that can take a tree are wrapped.
While no tree is being verified the wrapper hands the call on untouched; while one is, it evaluates
the model's own rule on LOGICAL positions (where a token stands in its text, not in the cache) and
lets a node see, of the new rows, only its own path. Windows and chunks so come out right with no
knowledge of any architecture.

Shapes: B batch, N tree nodes, S cache slots (the tree's own N at the end included).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from medusa_heads.machine.attention import (
    attended,
    attention_of_part,
    attention_of_words,
    grouped_attention,
    seen_words,
    split_pays,
)
from medusa_heads.trees import kernels

SUPPORTED_ATTENTION = ("sdpa", "eager")
_ACTIVE: ContextVar[TreeMask | None] = ContextVar("tree_mask", default=None)
_TRACED = [False]  # whether what is compiled now verifies trees: a compiler reads no ContextVar
_COMPILED, _COUNTING = [0], Lock()  # forwards of that kind, in all threads
# Where such forwards run uncompiled, what is made once of each mask, with the mask itself.
_KEPT: ContextVar[dict[Any, tuple[Tensor, Tensor]] | None] = ContextVar("kept", default=None)
LARGE = 1 << 19  # numbers in a layer's keys and values: to read all of fewer takes no longer
MANY = 512  # slots
_MASKS_KEPT = 4  # of a forward: more than models have kinds of layers
_OF_OTHER_KERNELS = ("position_bias", "cache", "softcap", "s_aux")


@dataclass(frozen=True)
class TreeMask:
    """What each tree node may attend to."""

    visible_BNS: Tensor  # cached rows of its own text, and its own path in the tree
    query_positions_BN: Tensor  # where each node stands in its text
    first_slot: int | Tensor  # where the tree begins in the cache; a tensor where no host knows
    padding_B: Tensor | None = None  # slots before the first position, None where no row has any
    bias_BNS: Tensor | None = None  # causal layers' mask as numbers, where it is kept ready
    # Where P nodes of the same tree, written before `first_slot` in earlier forwards, stand.
    written_positions_BP: Tensor | None = None
    # Masks of layers, each with itself once for every query head of a group.
    of_groups: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def first_on_host(self) -> int:
        """`first_slot` where the host knows it."""
        assert isinstance(self.first_slot, int)
        return self.first_slot

    @property
    def key_positions_BS(self) -> Tensor:
        """Where each slot's token stands in its text; only windows and chunks ask for it.
        Not kept: what keeps a property takes a lock up to Python 3.11, which no graph holds."""
        batch, nodes, slots = self.visible_BNS.shape
        positions_BS = torch.arange(slots, device=self.visible_BNS.device).repeat(batch, 1)
        if self.padding_B is not None:
            positions_BS -= self.padding_B[:, None]
        positions_BS[:, slots_from(self.first_slot, nodes)] = self.query_positions_BN
        if self.written_positions_BP is not None:
            written = self.written_positions_BP.shape[1]
            positions_BS[:, self.first_slot - written : self.first_slot] = self.written_positions_BP
        return positions_BS


def slots_from(first: int | Tensor, count: int) -> slice | Tensor:
    """So many slots from there on, to index with."""
    if isinstance(first, int):
        return slice(first, first + count)
    return first + torch.arange(count, device=first.device)


@contextmanager
def tree_attention(mask: TreeMask) -> Iterator[None]:
    """Within the block, forwards of N tokens are verifications of this tree."""
    take_tree_masks()
    token = _ACTIVE.set(mask)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


@cache
def take_tree_masks() -> None:
    """Let transformers' models ask for the masks of trees; once, when there is a model."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Assigning to the instance leaves transformers' global table alone; models look up this
    # instance.
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _folded(ALL_ATTENTION_FUNCTIONS["sdpa"])
    for name in SUPPORTED_ATTENTION:
        ALL_MASK_ATTENTION_FUNCTIONS[name] = _with_tree(ALL_MASK_ATTENTION_FUNCTIONS[name])


def _with_tree(build_mask: Callable[..., Any]) -> Callable[..., Any]:
    def build(*args: Any, **kwargs: Any) -> Any:
        tree = _ACTIVE.get()
        if tree is None:
            return build_mask(*args, **kwargs)
        from transformers.masking_utils import causal_mask_function

        rule = kwargs.get("mask_function", causal_mask_function)
        return mask_of(rule, tree, kwargs.get("dtype") or torch.float32)

    return build


def mask_of(rule: Any, tree: TreeMask, dtype: torch.dtype) -> Tensor:
    """The mask of layers with such a rule, as numbers [B, 1, N, S]."""
    from transformers.masking_utils import causal_mask_function

    if rule is causal_mask_function and tree.bias_BNS is not None:
        return tree.bias_BNS[:, None].to(dtype)
    return additive(_apply_rule(rule, tree), dtype)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to be added: 0 where allowed. Eager attention would take a bool mask for 0
    and 1, silently wrong; sdpa would turn it into numbers in every layer anew."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill(~allowed, torch.finfo(dtype).min)


def _apply_rule(rule: Any, tree: TreeMask) -> Tensor:
    from transformers.masking_utils import causal_mask_function

    visible_B1NS = tree.visible_BNS[:, None]
    if rule is causal_mask_function:
        return visible_B1NS  # a path and the text before it are causal already
    device, batch = visible_B1NS.device, visible_B1NS.shape[0]
    return visible_B1NS & rule(
        torch.arange(batch, device=device)[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device),
        tree.query_positions_BN[:, None, :, None],
        tree.key_positions_BS[:, None, None, :],
    )


def _folded(attend: Callable[..., Any]) -> Callable[..., Any]:
    """transformers repeats keys and values for grouped queries wherever there is a mask: a copy of
    the whole cache in every layer of every step. And a kernel that reads grouped heads reads keys
    and values once for each query head. Here the queries of a group are further tokens of one head:
    all read the same keys, and with a mask that is the same for all heads, see the same.
    """

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        heads, tokens = query.shape[1:3]
        groups = heads // key.shape[1]
        if attention_mask is None:
            folds = tokens == 1  # more of them are causal
        else:
            folds = attention_mask.shape[1:-1] in ((1, 1), (1, tokens), (heads, tokens))
        others = any(kwargs.get(name) is not None for name in _OF_OTHER_KERNELS)
        folds &= reads_tree() and not others
        if folds and not dropout and _in_graph(query, key, attention_mask):
            assert attention_mask is not None
            if _reads_part(key, value):
                return attention_of_part(query, key, value, attention_mask, scaling), None
            if split_pays(key.device, key.dtype, attended(query, key, value)):
                seen = _once(attention_mask, "seen", seen_words)
                return attention_of_words(query, key, value, seen, scaling), None
        if groups == 1 or not folds:
            return attend(
                module, query, key, value, attention_mask, dropout, scaling=scaling, **kwargs
            )
        mask = _for_groups(attention_mask, groups)
        # Contiguous, as transformers hands it out: models may ask for a view.
        return grouped_attention(query, key, value, mask, scaling, dropout), None

    return forward


def _in_graph(query_BHNX: Tensor, key_BGSX: Tensor, mask: Tensor | None) -> bool:
    """Whether this is a part of a graph, without gradients, and the mask one of numbers for all
    heads."""
    if mask is None or torch.is_grad_enabled():
        return False
    if not torch.compiler.is_compiling() and _KEPT.get() is None:
        return False
    of_all = len(query_BHNX), 1, query_BHNX.shape[2], key_BGSX.shape[2]
    return mask.dtype == query_BHNX.dtype and tuple(mask.shape) == of_all


def _reads_part(key_BGSX: Tensor, value_BGSY: Tensor) -> bool:
    """Whether this is a large cache on a CPU; or one of many slots where all that is done is noted,
    whose texts may stay much shorter."""
    large = key_BGSX.numel() + value_BGSY.numel() >= LARGE
    return key_BGSX.device.type == "cpu" and (large or (is_recorded() and key_BGSX.shape[2] > MANY))


def _for_groups(mask: Tensor | None, groups: int) -> Tensor | None:
    """The mask [B, 1, N, S] or [B, heads, N, S] for each group's queries one behind the other; once
    a forward where its layers share it."""
    if mask is None or mask.shape[2] == 1 == mask.shape[1]:
        return mask
    if mask.shape[1] > 1:
        return mask.reshape(mask.shape[0], -1, groups * mask.shape[2], mask.shape[3])
    return _once(mask, groups, lambda mask: mask.repeat(1, 1, groups, 1))


def _once(mask: Tensor, kind: object, make: Callable[[Tensor], Tensor]) -> Tensor:
    """What is made of a mask, once a forward where its layers share it."""
    if torch.compiler.is_compiling():
        return make(mask)
    known, name = _KEPT.get(), (id(mask), kind)
    if known is None:
        known = _ACTIVE.get().of_groups  # type: ignore[union-attr]
    if name not in known:
        if len(known) == _MASKS_KEPT:
            del known[next(iter(known))]
        known[name] = mask, make(mask)
    return known[name][1]


@contextmanager
def compiled_tree_attention() -> Iterator[None]:
    """Within the block, what is compiled verifies trees, whose masks it is given."""
    for ask in (split_pays, kernels.serve):  # asked for a graph, and no part of it
        torch.compiler.assume_constant_result(ask)
    _count_compiled(1)
    try:
        yield
    finally:
        _count_compiled(-1)


@contextmanager
def recorded_tree_attention() -> Iterator[None]:
    """Within the block, the same of one forward, or of one step, that is not compiled."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def _count_compiled(change: int) -> None:
    with _COUNTING:
        _COMPILED[0] += change
        _TRACED[0] = _COMPILED[0] > 0


def reads_tree() -> bool:
    """Whether a tree is being verified, or what verifies trees is compiled."""
    if torch.compiler.is_compiling():
        return _TRACED[0]
    return _ACTIVE.get() is not None or _KEPT.get() is not None


def is_recorded() -> bool:
    """Whether what a forward does is noted, to be done again by other means than a compiler's."""
    return not torch.compiler.is_compiling() and _KEPT.get() is not None
