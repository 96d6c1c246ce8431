"""What heads learn, without K logit tensors in memory, and without K times the rows but where
`encode` has made something of its own for each head (blocks, induction).

What a head keeps for its gradient grows with rows times heads, and would soon outgrow the target's
own forward. Therefore one block of rows comes after the other: each block's gradients are taken
before the next begins, so that only sums remain, of the parameters, and of the hidden states where
something before them learns.

Shapes: B batch, T tokens, R rows, K heads, N = R * K pairs, D hidden, V vocabulary of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from medusa_heads.config import IGNORED
from medusa_heads.heads import DraftHeads, product_dtype
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.fused import Pairs, Recipe, Workspace, matrix_losses, strips
from medusa_heads.training.loss.rows import SupervisedRows, per_item, read_rows
from medusa_heads.training.loss.teacher import Lessons, Teacher

# Features of a block: rows times heads times hidden size.
BLOCK_FEATURES_CPU = 1 << 21
BLOCK_FEATURES_GPU = 1 << 25
LEAST_BLOCK = 64
# On a CPU in low precision the number of rows is a multiple of this. oneDNN makes machine code for
# each shape that it meets, and a batch seldom has as many rows as one before.
ROWS_ALIKE = 64


def batch_loss(
    heads: DraftHeads,
    hidden_BTD: Tensor,
    inputs: Mapping[str, Tensor],
    num_items: Tensor | int | None = None,
    *,
    objective: LossConfig,
    teacher: Teacher | None = None,
) -> Tensor:
    """`rows_loss` of a batch and the target's hidden states of it, which `teacher` reads too; by
    default divided by the batch's own rows."""
    if teacher is not None:
        teacher = teacher.reading(hidden_BTD.detach())
    hidden_RD, rows = read_rows(heads, hidden_BTD, inputs)
    items = len(hidden_RD) if num_items is None else num_items
    return rows_loss(heads, hidden_RD, rows, objective=objective, num_items=items, teacher=teacher)


def rows_loss(
    heads: DraftHeads,
    hidden_RD: Tensor,
    rows: SupervisedRows,
    *,
    block_rows: int | None = None,
    **settings: Any,
) -> Tensor:
    """`heads_loss` of `heads.features(hidden, tokens)`, in memory that does not grow with K: over
    blocks of so many rows, by default as many as keep a block's memory in bounds.

    Gradients flow to the heads' parameters and to `hidden_RD`, once (no second derivatives).
    """
    if block_rows is None:
        on_cpu = hidden_RD.device.type == "cpu"
        budget = BLOCK_FEATURES_CPU if on_cpu else BLOCK_FEATURES_GPU
        made = rows.labels_RK.shape[1] * (heads.config.hidden_size or 1)  # of a row
        block_rows = max(budget // made, LEAST_BLOCK)
        if on_cpu and product_dtype(hidden_RD).itemsize < 4:
            block_rows -= block_rows % ROWS_ALIKE
            hidden_RD, rows = _with_spare(hidden_RD, rows, -len(hidden_RD) % ROWS_ALIKE)
    block_loss = _BlockLoss(heads, rows, settings)
    # At least one block, so that without any row there still is a zero with zero gradients.
    starts = range(0, max(len(hidden_RD), 1), block_rows)
    blocks = [slice(start, start + block_rows) for start in starts]
    if len(blocks) == 1 or not torch.is_grad_enabled():
        return torch.stack([block_loss(hidden_RD[block], block) for block in blocks]).sum()
    # What reads whole texts has made `hidden_RD`: its gradients come through that.
    modules = (heads.fusion, heads.encoder())
    before = {parameter for module in modules if module for parameter in module.parameters()}
    learning = {
        name: parameter
        for name, parameter in block_loss.named_parameters()
        if parameter.requires_grad and parameter not in before
    }
    return _Blocks.apply(block_loss, tuple(learning), blocks, hidden_RD, *learning.values())


def _with_spare(
    hidden_RD: Tensor, rows: SupervisedRows, spare: int
) -> tuple[Tensor, SupervisedRows]:
    """With so many further rows, of which nothing is learnt: the first once more."""
    picks_R = F.pad(torch.arange(len(hidden_RD)), (0, spare))
    more = SupervisedRows(*(of_rows[picks_R] for of_rows in vars(rows).values()))
    more.labels_RK[len(hidden_RD) :] = IGNORED
    return torch.cat([hidden_RD, hidden_RD[:1].detach().expand(spare, -1)]), more


class _BlockLoss(nn.Module):
    """The loss of one block of rows; settings as `heads_loss` takes them."""

    def __init__(self, heads: DraftHeads, rows: SupervisedRows, settings: dict[str, Any]) -> None:
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
        # Rounded once for all blocks, whose gradients so stay as small until they are summed: in
        # fp32, also those in bf16.
        used = [p.to(product_dtype(p)).detach().requires_grad_() for p in parameters]
        exact = [torch.promote_types(torch.float32, p.dtype) for p in parameters]
        sums = [torch.zeros_like(p, dtype=t) for p, t in zip(parameters, exact, strict=True)]
        grad_RD = torch.empty_like(hidden_RD) if through else None
        # Shares of a large step would vanish in fp16, which no loss scale could prevent, because
        # that comes only in backward. A power of two, so that nothing is rounded; well below the
        # divisor, which leaves room for sums over a block.
        items = torch.as_tensor(block_loss.settings["num_items"] / 16)
        ctx.scale = items.clamp(min=1).log2().floor().exp2()
        losses = []
        for block in blocks:
            part_RD = hidden_RD[block].detach().requires_grad_(through)
            with torch.enable_grad():
                weights = dict(zip(names, used, strict=True))
                loss = functional_call(block_loss, weights, (part_RD, block))
            losses.append(loss.detach())
            wanted = (*used, part_RD) if through else used
            grads = torch.autograd.grad(loss, wanted, ctx.scale.to(loss))
            del loss
            if grad_RD is not None:
                grad_RD[block] = grads[-1]
            for i, total in enumerate(sums):
                # In strips, because a sum of two dtypes makes a copy of the one in the other.
                for strip in strips(len(total), total[0].numel(), total.device.type):
                    total[strip] += grads[i][strip]
            del grads
        # Not among autograd's saved tensors, so that backward can scale them where they are.
        ctx.grads = [grad_RD, *(s.to(p.dtype) for s, p in zip(sums, parameters, strict=True))]
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


def heads_loss(
    heads: DraftHeads,
    features_RKD: Tensor,
    rows: SupervisedRows,
    *,
    objective: LossConfig | None = None,
    num_items: Tensor | int,
    teacher: Teacher | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """`sum over rows and heads of weight * loss / num_items`, as `objective` says (by default
    cross-entropy with weights 0.8 ** i): a scalar in fp32 (fp64 for fp64), 0 with zero gradients
    where nothing is supervised. Vocabulary matrices are trained where they are the heads' own.

    With a reduced vocabulary, a true token outside it has no cross-entropy; forward and reverse KL
    compare with the target's distribution over the tokens that can be drafted, brought to sum 1;
    total variation and acceptance with its probabilities as they are, so that what cannot be
    drafted counts as lost. Raises ValueError: a term needs the teacher, and none is given.

    Args:
        num_items: counted over ALL micro-batches of an optimiser step.
        teacher: the target, reading this batch; needed by all terms but cross-entropy.
        workspace: memory for the logits, where several calls follow each other.
    """
    objective = objective or LossConfig()
    labels_RK = heads.draft_ids(rows.labels_RK)
    compute = product_dtype(heads.vocab_matrix(0)[0])
    recipe = Recipe(objective, compute, workspace=workspace or Workspace())
    supervised_RK = labels_RK != IGNORED  # tokens that cannot be drafted teach nothing here
    if objective.needs_teacher:
        if teacher is None:
            raise ValueError(
                f"the loss terms {sorted(objective.terms)} need the target's own distribution: "
                "pass teacher=Teacher.from_target(target).reading(hidden)"
            )
        lessons = Lessons(teacher, heads.draft_tokens, objective, recipe.compute)
        recipe = replace(recipe, lessons=lessons)
        supervised_RK = rows.labels_RK != IGNORED
    offsets_K = 1 + torch.arange(labels_RK.shape[1], device=labels_RK.device)
    positions_RK = rows.positions_R[:, None] + offsets_K
    own, correction = heads.config.vocab_matrix == "own", heads.correction
    # The rows of all heads go through one matrix together. Of several, head after head takes all
    # rows: each matrix and its gradient are large, and read once a chunk.
    apart = range(heads.num_matrices if heads.num_matrices > 1 else 0)
    columns = [slice(i, i + 1) for i in apart] or [slice(None)]
    parts = [
        partial(
            matrix_losses,
            features_RKD[:, of].flatten(0, 1),
            *heads.vocab_matrix(of.start or 0),
            Pairs(labels_RK[:, of].flatten(), positions_RK[:, of].flatten()),
            correction=None
            if correction is None
            else correction.factors(rows.tokens_RK[:, of].flatten()),
        )
        for of in columns
    ]
    if not own and correction is None:
        losses_N, log_true_N, _ = parts[0](recipe)
        weights_RK = _weights(objective, log_true_N.view_as(labels_RK), supervised_RK)
        return per_item((losses_N * weights_RK.flatten()).sum(), num_items)
    log_true_RK = features_RKD.new_empty(labels_RK.shape, dtype=recipe.exact)
    if objective.head_weights == "acceptance":
        # A pair's weight hangs on all heads, so it takes a pass of its own to know them first.
        plain = replace(recipe, objective=LossConfig(), lessons=None)
        with torch.no_grad():
            for of, part in zip(columns, parts, strict=True):
                log_true_RK[:, of] = part(plain)[1].view_as(log_true_RK[:, of])
    weights_RK = _weights(objective, log_true_RK, supervised_RK)
    weights = [weights_RK[:, of].flatten() for of in columns]
    sums = [part(recipe, w_N)[2] for part, w_N in zip(parts, weights, strict=True)]
    return per_item(torch.stack(sums).sum(), num_items)


def _weights(objective: LossConfig, log_true_RK: Tensor, supervised_RK: Tensor) -> Tensor:
    """How much each pair of a position and a head counts."""
    if objective.head_weights == "decay":
        return decay_weights(supervised_RK, objective.decay, log_true_RK.dtype)
    return acceptance_weights(log_true_RK, supervised_RK, objective.smoothing)


def decay_weights(
    supervised_RK: Tensor, decay: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`decay ** i` for head i (Cai et al. 2024, arXiv:2401.10774, section 2.2.1)."""
    heads_K = torch.arange(supervised_RK.shape[1], device=supervised_RK.device, dtype=dtype)
    return torch.pow(decay, heads_K) * supervised_RK


def acceptance_weights(log_true_RK: Tensor, supervised_RK: Tensor, smoothing: float) -> Tensor:
    """D-PACE (Wu et al. 2026, arXiv:2605.18810, equations 7 and 8; `smoothing` is alpha there).

    With c_i the probability that head i gives the true token, smoothed to (1 - smoothing) c_i +
    smoothing, a draft is accepted up to about S = sum_m prod_{i <= m} c_i tokens. A pair counts as
    much as S hangs on it, w_j = dS / d log c_j = sum_{m >= j} prod_{i <= m} c_i, a number without
    gradient, between 0 and K: early heads count most, and the later ones more as the earlier ones
    get better. Pairs that are not supervised neither stop a draft nor add to its length.
    """
    confidence_RK = (1 - smoothing) * log_true_RK.detach().exp() + smoothing
    reached_RK = confidence_RK.where(supervised_RK, 1).cumprod(dim=1) * supervised_RK
    return reached_RK.flip(1).cumsum(dim=1).flip(1) * supervised_RK
