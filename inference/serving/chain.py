"""What an engine that verifies chains should count, from the target and the heads alone.

Serving engines draft each head's best token, in a row, and report how many were accepted. Broken
heads leave their output as it was, so only those counters tell whether heads were loaded right:
`simulate_chain` says what they must be, in greedy decoding.

Shapes: T tokens, D hidden, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_heads.cache_names import cache_of
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import BlockHeads, DraftHeads, Eagle3Heads
from medusa_heads.target.target import TargetModel


@dataclass(frozen=True)
class SimulatedChain:
    """Greedy text, and what an engine counts while it makes that text with a chain."""

    texts: list[list[int]]  # the new tokens of each prompt, an end token included
    drafts: int  # chains verified
    draft_tokens: int  # tokens in them
    accepted: int  # of the last chain also those past the end of the text, if it reaches there
    accepted_per_position: list[int]  # the same by place in the chain [K]


def check_chain(config: HeadsConfig, draft_tokens: int) -> None:
    """Raises ValueError where an engine cannot draft so many tokens with such heads from one hidden
    state alone."""
    if config.kind == "hydra":
        raise ValueError(
            f"{config.kind} heads see the tokens drafted before theirs, which this engine does not "
            "hand on: serve heads of kind 'medusa'"
        )
    if config.reads_text:
        raise ValueError(
            "these heads attend over the text so far, for which this engine keeps no cache: serve "
            "heads of kind 'medusa' without prefix_attention and induction"
        )
    if config.features is not None:
        raise ValueError(
            "these heads read layers of the target, of which this engine hands on the last hidden "
            "state alone: serve heads without features"
        )
    _check_count(config, draft_tokens)


def _check_count(config: HeadsConfig, draft_tokens: int) -> None:
    if not 1 <= draft_tokens <= config.num_heads:
        raise ValueError(
            f"{config.num_heads} heads draft 1 to {config.num_heads} tokens, not {draft_tokens}: "
            "change num_speculative_tokens"
        )


@torch.no_grad()
def simulate_chain(
    target: TargetModel,
    heads: DraftHeads,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    draft_tokens: int | None = None,
    end_tokens: Collection[int] = (),
    past_end: bool = True,
) -> SimulatedChain:
    """Decode prompts of token ids greedily one by one, up to one of the end tokens, and count what
    a chain of drafts (by default of all heads) would have saved. Counts can be compared exactly in
    fp32. Raises ValueError: heads that do not draft such chains, or an empty prompt. An engine
    samples the first new token from the prompt, and drafts from then on. vLLM verifies whole
    chains: the last one counts in full, even where the text ends within it. llama.cpp drafts no
    token that `max_new_tokens` leaves no room for (`past_end=False`), and the last one never."""
    draft_tokens = heads.config.num_heads if draft_tokens is None else draft_tokens
    target = target.with_features(heads.config.features)
    if isinstance(heads, BlockHeads):
        _check_count(heads.config, draft_tokens)
    elif not isinstance(heads, Eagle3Heads):
        check_chain(heads.config, draft_tokens)
    texts = []
    accepted_K = [0] * draft_tokens
    drafts = verified = 0
    for prompt in prompts:
        if not prompt:
            raise ValueError("expected prompts of at least one token, got an empty one")
        # As far as the last chain can reach.
        tokens_T = greedy(target, prompt, max_new_tokens + draft_tokens)
        new = tokens_T[len(prompt) :].tolist()
        ends = [n for n, token in enumerate(new[:max_new_tokens], start=1) if token in end_tokens]
        length = min([*ends, max_new_tokens])
        texts.append(new[:length])
        # What each head would draft at each position, behind the token that follows there.
        ids_T = tokens_T.to(target.device)
        hidden_1TX, chain = target.hidden(ids_T[None]), [ids_T.roll(-1)]
        if isinstance(heads, Eagle3Heads):
            places_T = torch.arange(len(ids_T), device=ids_T.device)
            after = heads.after_text(hidden_1TX, ids_T[None], None, places_T)
        elif isinstance(heads, BlockHeads):
            after = heads.after_paths(heads.encode(hidden_1TX, ids_T[None])[0], likely=None)
        else:
            after = heads.after_paths(hidden_1TX[0], likely=None)
        above_T1 = ids_T.new_zeros(len(ids_T), 1)
        for i in range(draft_tokens):
            paths_T1J = torch.stack(chain, dim=1)[:, None]
            logits_T1V, _ = after(i, paths_T1J, above_T1)
            chain.append(heads.token_ids(logits_T1V[:, 0].argmax(dim=-1)))
        chains_TK = torch.stack(chain[1:], dim=1).tolist()
        made = 1
        while made < length:
            drafted = chains_TK[len(prompt) + made - 2]  # by the state that chose the last token
            most = draft_tokens if past_end else min(draft_tokens, length - made - 1)
            agreed = 0
            while agreed < most and drafted[agreed] == new[made + agreed]:
                accepted_K[agreed] += 1
                agreed += 1
            drafts, verified = drafts + (most > 0), verified + most
            made += agreed + 1
    return SimulatedChain(texts, drafts, verified, sum(accepted_K), accepted_K)


def greedy(target: TargetModel, prompt: Sequence[int], new_tokens: int) -> Tensor:
    """The prompt and so many tokens after it, whatever they are: ids [T] on the CPU."""
    tokens = unread = list(prompt)
    cache = None
    for _ in range(new_tokens):
        input_ids_BT = torch.tensor([unread], device=target.device)
        given: Any = {"input_ids": input_ids_BT, target.cache_argument: cache}
        output = target.model(**given, use_cache=True)
        cache = cache_of(output)
        unread = [int(output.logits[0, -1].argmax())]
        tokens = tokens + unread
    return torch.tensor(tokens)
