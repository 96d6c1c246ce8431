"""The heads and their loss over one block of rows after the other.

What a head keeps for its gradient grows with rows times heads, and would soon outgrow the target's
own forward. Here each block's gradients are taken before the next block begins, so that only sums
remain: of the parameters, and of the hidden states where something before them learns.

Shapes: R rows, K heads, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from medusa_heads.heads import DraftHeads
from medusa_heads.training.loss import heads_loss
from medusa_heads.training.loss_config import LossConfig
from medusa_heads.training.rows import SupervisedRows
from medusa_heads.training.teacher import Teacher
from medusa_heads.training.vocab_loss import Workspace

# Features of a block: rows times heads times hidden size.
BLOCK_FEATURES_CPU = 1 << 21
BLOCK_FEATURES_GPU = 1 << 25
LEAST_BLOCK = 64


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
        width = rows.labels_RK.shape[1] * hidden_RD.shape[1]
        block_rows = max(budget // width, LEAST_BLOCK)

    workspace = Workspace()

    def block_loss(hidden_RD: Tensor, block: slice) -> Tensor:
        part = SupervisedRows(rows.positions_R[block], rows.labels_RK[block], rows.tokens_RK[block])
        features_RKD = heads.features(hidden_RD, part.tokens_RK)
        return heads_loss(
            heads,
            features_RKD,
            part,
            objective=objective,
            num_items=num_items,
            teacher=teacher,
            workspace=workspace,
        )

    # At least one block, so that without any row there still is a zero with zero gradients.
    starts = range(0, max(len(hidden_RD), 1), block_rows)
    blocks = [slice(start, start + block_rows) for start in starts]
    if len(blocks) == 1:
        return block_loss(hidden_RD, blocks[0])
    if not torch.is_grad_enabled():
        return torch.stack([block_loss(hidden_RD[block], block) for block in blocks]).sum()
    learning = [parameter for parameter in heads.parameters() if parameter.requires_grad]
    loss: Tensor = _Blocks.apply(block_loss, blocks, hidden_RD, *learning)
    return loss


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, block_loss: Any, blocks: list[slice], hidden_RD: Tensor, *parameters: Tensor
    ) -> Tensor:
        through = ctx.needs_input_grad[2]
        grad_RD = torch.empty_like(hidden_RD) if through else None
        sums: list[Tensor | None] = [None] * len(parameters)
        losses = []
        for block in blocks:
            part_RD = hidden_RD[block].detach().requires_grad_(through)
            with torch.enable_grad():
                loss = block_loss(part_RD, block)
            losses.append(loss.detach())
            wanted = (*parameters, part_RD) if through else parameters
            grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, wanted, allow_unused=True)
            del loss
            if grad_RD is not None:
                assert grads[-1] is not None
                grad_RD[block] = grads[-1]
            for i, grad in enumerate(grads[: len(parameters)]):
                if grad is None:
                    continue
                # fp32 sums, also of bf16 parameters.
                before = sums[i]
                exact = torch.promote_types(torch.float32, grad.dtype)
                sums[i] = grad.to(exact) if before is None else before.add_(grad)
        # Not among autograd's saved tensors, so that backward can scale them where they are.
        ctx.grads = [grad_RD]
        for total, parameter in zip(sums, parameters, strict=True):
            ctx.grads.append(None if total is None else total.to(parameter.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("the gradients of rows_loss are handed out once: no second backward")
        scaled = (None if taken is None else taken.mul_(grad.to(taken.dtype)) for taken in grads)
        return (None, None, *scaled)
