"""The heads and their loss over one block of rows after the other.

What a head keeps for its gradient grows with rows times heads, and would soon outgrow the target's
own forward. Here each block's gradients are taken before the next block begins, so that only sums
remain: of the parameters, and of the hidden states where something before them learns.

Shapes: B batch, T tokens, R rows, K heads, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from medusa_heads.heads import DraftHeads, product_dtype
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.fused import Workspace, strips
from medusa_heads.training.loss.heads import heads_loss
from medusa_heads.training.loss.rows import SupervisedRows, encode_rows
from medusa_heads.training.loss.teacher import Teacher

# Features of a block: rows times heads times hidden size.
BLOCK_FEATURES_CPU = 1 << 21
BLOCK_FEATURES_GPU = 1 << 25
LEAST_BLOCK = 64


def batch_loss(
    heads: DraftHeads,
    hidden_BTD: Tensor,
    inputs: Mapping[str, Tensor],
    rows: SupervisedRows,
    *,
    objective: LossConfig,
    num_items: Tensor | int,
    teacher: Teacher | None = None,
) -> Tensor:
    """`rows_loss` of a batch and the target's hidden states of it, which `teacher` reads too."""
    if teacher is not None:
        teacher = teacher.reading(hidden_BTD.detach())
    hidden_RD = encode_rows(heads, hidden_BTD, inputs, rows)
    return rows_loss(
        heads, hidden_RD, rows, objective=objective, num_items=num_items, teacher=teacher
    )


def rows_loss(
    heads: DraftHeads,
    hidden_RD: Tensor,
    rows: SupervisedRows,
    *,
    objective: LossConfig | None = None,
    num_items: Tensor | int,
    teacher: Teacher | None = None,
    block_rows: int | None = None,
) -> Tensor:
    """`heads_loss` of `heads.features(hidden, tokens)`, in memory that does not grow with K.

    Gradients flow to the heads' parameters and to `hidden_RD`, once (no second derivatives).

    Args:
        heads: whose parameters get the gradients.
        hidden_RD: what the heads read at the rows.
        rows: see `heads_loss`, as for `objective`, `num_items` and `teacher`.
        block_rows: rows of a block; default: as many as keep a block's memory in bounds.
    """
    if block_rows is None:
        on_cpu = hidden_RD.device.type == "cpu"
        budget = BLOCK_FEATURES_CPU if on_cpu else BLOCK_FEATURES_GPU
        block_rows = max(budget // (rows.labels_RK.shape[1] * hidden_RD.shape[1]), LEAST_BLOCK)
    block_loss = _BlockLoss(heads, rows, objective=objective, num_items=num_items, teacher=teacher)
    # At least one block, so that without any row there still is a zero with zero gradients.
    starts = range(0, max(len(hidden_RD), 1), block_rows)
    blocks = [slice(start, start + block_rows) for start in starts]
    if len(blocks) == 1 or not torch.is_grad_enabled():
        return torch.stack([block_loss(hidden_RD[block], block) for block in blocks]).sum()
    # Prefix layers have made `hidden_RD`: their gradients come through that.
    learning = {
        name: parameter
        for name, parameter in block_loss.named_parameters()
        if parameter.requires_grad and not name.startswith("heads.prefix.")
    }
    loss: Tensor = _Blocks.apply(block_loss, tuple(learning), blocks, hidden_RD, *learning.values())
    return loss


class _BlockLoss(nn.Module):
    """The loss of one block of rows; settings as `heads_loss` takes them."""

    def __init__(self, heads: DraftHeads, rows: SupervisedRows, **settings: Any) -> None:
        super().__init__()
        self.heads = heads
        self.rows = rows
        self.settings = {**settings, "workspace": Workspace()}

    def forward(self, hidden_RD: Tensor, block: slice) -> Tensor:
        part = SupervisedRows(*(of_rows[block] for of_rows in vars(self.rows).values()))
        features_RKD = self.heads.features(hidden_RD, part.tokens_RK)
        return heads_loss(self.heads, features_RKD, part, **self.settings)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        block_loss: _BlockLoss,
        names: tuple[str, ...],
        blocks: list[slice],
        hidden_RD: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        through = ctx.needs_input_grad[3]
        grad_RD = torch.empty_like(hidden_RD) if through else None
        # Rounded once for all blocks, whose gradients so stay as small until they are summed: in
        # fp32, also those in bf16.
        used = [p.to(product_dtype(p)).detach().requires_grad_() for p in parameters]
        sums = [
            torch.zeros_like(p, dtype=torch.promote_types(torch.float32, p.dtype))
            for p in parameters
        ]
        # Shares of a large step would vanish in fp16, which no loss scale could prevent, because
        # that comes only in backward. A power of two, so that nothing is rounded; well below the
        # divisor, which leaves room for sums over a block.
        items = torch.as_tensor(block_loss.settings["num_items"] / 16)
        scale = items.clamp(min=1).log2().floor().exp2()
        losses = []
        for block in blocks:
            part_RD = hidden_RD[block].detach().requires_grad_(through)
            with torch.enable_grad():
                weights = dict(zip(names, used, strict=True))
                loss = functional_call(block_loss, weights, (part_RD, block))
            losses.append(loss.detach())
            wanted = (*used, part_RD) if through else used
            grads = torch.autograd.grad(loss, wanted, scale.to(loss))
            del loss
            if grad_RD is not None:
                grad_RD[block] = grads[-1]
            for i, total in enumerate(sums):
                # In strips, because a sum of two dtypes makes a copy of the one in the other.
                for strip in strips(len(total), total[0].numel(), total.device.type):
                    total[strip] += grads[i][strip]
            del grads
        ctx.scale = scale
        # Not among autograd's saved tensors, so that backward can scale them where they are.
        ctx.grads = [grad_RD]
        for total, parameter in zip(sums, parameters, strict=True):
            ctx.grads.append(total.to(parameter.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("the gradients of rows_loss are handed out once: no second backward")
        grad = grad / ctx.scale
        scaled = (None if taken is None else taken.mul_(grad.to(taken.dtype)) for taken in grads)
        return (None, None, None, *scaled)
