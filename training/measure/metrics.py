"""What an evaluation on held-out text says: of heads, whose guesses hold the true tokens at some
rank, and of draft models.

Shapes: B batch or sequences, T tokens, R rows, C rows of a chunk, X any of these, K heads (or
drafts of a chain), D hidden, V vocabulary of the heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import IGNORED, RankPath
from medusa_heads.heads import DraftHeads
from medusa_heads.training.loss.fused import chunk_pairs
from medusa_heads.training.loss.rows import SupervisedRows
from medusa_heads.trees.statistics import HeadStatistics, simulate_steps, tokens_per_step

TREE_SIZES = (16, 32)
_SHOWN = 128  # tokens of a text
CHAINS = tuple(range(1, 9))  # drafts of a draft model in a row
TARGET_FIGURES = ("loss", "loss_before", "kl")  # of a target that learns too


@torch.no_grad()
def head_ranks(heads: DraftHeads, hidden_RD: Tensor, rows: SupervisedRows, max_rank: int) -> Tensor:
    """ranks_RK each head gave the true tokens: 0 for its top-1, `max_rank` for all at or beyond,
    -100 where the rows' labels are.

    Equal logits, common in bf16, rank by token id; a token that the heads cannot draft ranks last.
    Features and logits exist for one chunk of rows at a time.
    """
    labels_RK = rows.labels_RK
    drafted_RK = heads.draft_ids(labels_RK)
    ranks_RK = torch.full_like(labels_RK, IGNORED)
    dtype = heads.vocab_matrix(0)[0].dtype
    size = chunk_pairs(heads.config.num_candidates, hidden_RD.device.type, dtype)
    for start in range(0, len(labels_RK), size):
        chunk = slice(start, start + size)
        features_CKD = heads.features(hidden_RD[chunk], rows.tokens_RK[chunk])
        for i in range(labels_RK.shape[1]):
            logits_CV = heads.project(i, features_CKD[:, i])
            logits_CV = heads.corrected(logits_CV, rows.tokens_RK[chunk, i])
            drafted_C = drafted_RK[chunk, i]
            rank_C = ranks_of(logits_CV, drafted_C).where(drafted_C != IGNORED, max_rank)
            rank_C = rank_C.clamp(max=max_rank)
            ranks_RK[chunk, i] = rank_C.where(labels_RK[chunk, i] != IGNORED, IGNORED)
    return ranks_RK


def ranks_of(logits_XV: Tensor, drafted_X: Tensor) -> Tensor:
    """The rank of each of these tokens among its row's logits; of IGNORED ones it says nothing."""
    label_X1 = drafted_X[..., None].clamp(min=0)
    true_X1 = logits_XV.gather(-1, label_X1)
    tokens_V = torch.arange(logits_XV.shape[-1], device=logits_XV.device)
    ahead_XV = (logits_XV > true_X1) | ((logits_XV == true_X1) & (tokens_V < label_X1))
    return ahead_XV.sum(dim=-1)


def rank_statistics(ranks_BTK: Tensor) -> HeadStatistics:
    """Head statistics over all positions of an evaluation."""
    return HeadStatistics.from_ranks(ranks_BTK.flatten(0, 1))


def rank_metrics(ranks_BTK: Tensor) -> dict[str, float]:
    """`head0_top1`, `head0_top5`, .. and `tokens_per_step_16`, `tokens_per_step_32`.

    Tokens per step are simulated: the same sequences are walked with the best static tree that
    their own ranks imply. With thousands of positions for a few dozen nodes that flatters little.
    Heads are accepted one after the other: `head0_accepted`, .. are the shares of the steps that
    came to a head, along the best 32 nodes, in which its draft was accepted.
    """
    statistics = rank_statistics(ranks_BTK)
    return _figures(ranks_BTK, statistics, {n: statistics.choices(n) for n in TREE_SIZES})


def chain_metrics(ranks_BTK: Tensor) -> dict[str, float]:
    """As `rank_metrics`, of what drafts each token behind its likeliest one alone: whatever the
    size, the tree is the chain of K."""
    trees = dict.fromkeys(TREE_SIZES, chain_tree(ranks_BTK))
    return _figures(ranks_BTK, rank_statistics(ranks_BTK), trees)


def best_tree(ranks_BTK: Tensor) -> list[RankPath]:
    """The best static tree of the most nodes that `rank_metrics` walks with."""
    return rank_statistics(ranks_BTK).choices(TREE_SIZES[-1])


def chain_tree(ranks_BTK: Tensor) -> list[RankPath]:
    """That of `chain_metrics`: nothing but likeliest tokens."""
    return [(0,) * (depth + 1) for depth in range(ranks_BTK.shape[2])]


def _figures(
    ranks_BTK: Tensor, statistics: HeadStatistics, trees: Mapping[int, Sequence[RankPath]]
) -> dict[str, float]:
    figures = {
        f"head{i}_top{k}": accuracy
        for k in (1, 5)
        for i, accuracy in enumerate(statistics.top_k_accuracy(k))
    }
    for size, choices in trees.items():
        steps = simulate_steps(ranks_BTK, choices)
        figures[f"tokens_per_step_{size}"] = tokens_per_step(steps)
    came = [sum(steps[i:]) for i in range(len(steps))]
    for i, (here, on) in enumerate(itertools.pairwise(came)):
        figures[f"head{i}_accepted"] = on / max(here, 1)
    return figures


def accepted_text(
    ranks_BTK: Tensor, labels_BT: Tensor, choices: Collection[RankPath], tokenizer: Any
) -> str:
    """The beginning of the first held-out text as decoding with a tree would write it, with a bar
    between what two steps commit; "" where no head drafted a token of it."""
    drafted_BT = ranks_BTK[..., 0] >= 0  # later heads may have nothing behind them to be right of
    if not drafted_BT.any():
        return ""
    b, t = (int(place) for place in drafted_BT.nonzero()[0])
    ranks, labels = ranks_BTK[b].tolist(), labels_BT[b].tolist()
    parts = [labels[t + 1 : t + 2]]
    first = t
    while t < min(len(labels), first + _SHOWN) and drafted_BT[b, t]:
        path, accepted = tuple(ranks[t]), 0
        while path[: accepted + 1] in choices and accepted < len(path):
            accepted += 1
        parts.append([token for token in labels[t + 2 : t + 3 + accepted] if token != IGNORED])
        t += 1 + accepted
    return "|".join(tokenizer.batch_decode(parts))


def describe(metrics: Mapping[str, Any]) -> str | None:
    """One readable line out of `rank_metrics`, as the Trainer named them, and one of the target's
    own figures; None where the metrics are others."""
    if "eval_head0_top1" not in metrics:
        return None
    steps = ", ".join(
        f"{metrics[f'eval_tokens_per_step_{size}']:.2f} with {size} nodes" for size in TREE_SIZES
    )
    line = f"{_described(metrics)} | tokens per step {steps}"
    own = target_figures(metrics)
    return line if own is None else f"{line}\n{target_line(own)}"


def describe_chain(metrics: Mapping[str, Any]) -> str | None:
    """One readable line out of `chain_metrics`; None where the metrics are others."""
    if "eval_head0_top1" not in metrics:
        return None
    steps = metrics[f"eval_tokens_per_step_{TREE_SIZES[0]}"]
    return f"{_described(metrics)} | tokens per step {steps:.2f} in chains"


def _described(metrics: Mapping[str, Any]) -> str:
    def of_heads(k: int) -> str:
        names = (f"eval_head{i}_top{k}" for i in range(len(metrics)))
        return " ".join(f"{metrics[name]:.3f}" for name in names if name in metrics)

    return f"held-out top-1 {of_heads(1)} | top-5 {of_heads(5)}"


def target_figures(metrics: Mapping[str, Any]) -> dict[str, float] | None:
    """How the target itself did, with its adapter and without; None where it did not learn."""
    if "eval_target_loss" not in metrics:
        return None
    return {name: metrics[f"eval_target_{name}"] for name in TARGET_FIGURES}


def target_line(figures: Mapping[str, float]) -> str:
    """`target_figures` in a line."""
    now, before = figures["loss"], figures["loss_before"]
    return (
        f"the target's own held-out loss {now:.4f}, without adapter {before:.4f} "
        f"({now / before - 1:+.2%}), KL {figures['kl']:.4f}"
    )


def draft_metrics(figures_BT3: Tensor) -> dict[str, float]:
    """Means over all held-out positions, and simulated tokens per step.

    `figures_BT3` hold at every position -100, or: sum min(p, q) over the vocabulary, whether the
    likeliest tokens of target and draft are the same, and whether the draft's likeliest token is
    the text's next one. Of them are made `acceptance`, the chance that a token drawn from q
    survives the rejection rule (Leviathan et al. 2022, arXiv:2211.17192, corollary 3.6),
    `agreement`, and `tokens_per_step_1`, .., `tokens_per_step_8`, what greedy chains of these
    lengths would have reached on the very text, bonus token included.
    """
    known_BT = figures_BT3[..., 0] != IGNORED
    acceptance, agreement, _ = figures_BT3[known_BT].double().mean(dim=0).tolist()
    figures = {"acceptance": acceptance, "agreement": agreement}
    # Rank 0 is the draft's likeliest token; a chain of n is a tree of nothing but such ranks.
    ranks_BT = torch.where(known_BT, 1 - figures_BT3[..., 2], IGNORED).to(torch.int8)
    padded_BT = F.pad(ranks_BT, (0, CHAINS[-1] - 1), value=IGNORED)
    ranks_BTK = padded_BT.unfold(1, CHAINS[-1], 1)
    for length in CHAINS:
        simulated = tokens_per_step(simulate_steps(ranks_BTK, chain_tree(ranks_BTK[..., :length])))
        figures[f"tokens_per_step_{length}"] = simulated
    return figures


def describe_draft(metrics: Mapping[str, Any]) -> str | None:
    """One readable line out of `draft_metrics`; None where the metrics are others."""
    if "eval_acceptance" not in metrics:
        return None
    steps = ", ".join(
        f"{metrics[f'eval_tokens_per_step_{length}']:.2f} with {length}" for length in (2, 4, 8)
    )
    return (
        f"held-out acceptance {metrics['eval_acceptance']:.3f}, agreement "
        f"{metrics['eval_agreement']:.3f} | tokens per step {steps} drafted"
    )
