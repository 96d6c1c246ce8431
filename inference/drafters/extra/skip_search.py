"""Which of a target's layers to leave out of its drafts: measured on text, kept on disk.

A set's agreement is how often the target without those layers names the token that the whole target
names, each time behind the whole target's own cache, as it is when a draft's first token is chosen.
All positions of a text are asked in one forward: position t reads the cached rows before t and
nothing of the others.

Shapes: B texts, T tokens, S cache slots.
Source: Zhang et al. 2023, arXiv:2309.08168, section 3.2, with a greedy search in place of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_heads.inference.drafters.extra.early_exit import ExitClock
from medusa_heads.inference.drafters.extra.layer_stack import LayerStack
from medusa_heads.machine.measurements import Measurements
from medusa_heads.target.attention import TreeMask
from medusa_heads.target.target import TargetModel

_TEXTS, _TOKENS = 4, 128  # of the target's own, where no text is given
_PROMISING = 6  # layers that are tried next, of those that cost least agreement before
_HOPELESS = 0.2  # agreement below which no further layer is left out

Measured = dict[tuple[int, ...], float]  # agreement by what is left out


def best_skip_set(
    target: TargetModel,
    stack: LayerStack,
    clock: ExitClock,
    most: int,
    text_BT: Tensor | None = None,
) -> tuple[tuple[int, ...], float]:
    """The layers without which drafts of at most so many tokens promise the most tokens per second,
    and how often such drafts agree with the target. Measured on token ids without padding, by
    default on text of the target's own."""
    measured = skip_sets(target, stack, text_BT)

    def speed(skipped: tuple[int, ...]) -> float:
        # Of the best length: Leviathan et al. 2022, arXiv:2211.17192, equation 1 over costs.
        token, agreement = clock.token(len(stack) - len(skipped)), measured[skipped]
        return max(
            sum(agreement**i for i in range(size + 1)) / (clock.steps.step(size + 1) + size * token)
            for size in range(most + 1)
        )

    best = max(measured, key=speed)
    return best, measured[best]


@torch.no_grad()
def skip_sets(target: TargetModel, stack: LayerStack, text_BT: Tensor | None = None) -> Measured:
    """Agreement of every set that was tried: all early exits, and one layer more at a time."""
    store = Measurements()
    facts = {
        "target": target.config.to_dict() | {"_name_or_path": None},
        "fingerprint": target.fingerprint(),
        "dtype": str(target.dtype),
        "text": None if text_BT is None else text_BT.tolist(),
    }
    try:
        return _known(store.read("skip_sets", facts), len(stack))
    except (LookupError, OverflowError, TypeError, ValueError):
        pass  # nothing there, or damaged: measured anew
    agreement = Agreement(target, stack, own_text(target) if text_BT is None else text_BT)
    measured = search(agreement, len(stack))
    store.write("skip_sets", facts, {"sets": list(measured.items())})
    return measured


def _known(stored: Any, layers: int) -> Measured:
    measured = {tuple(map(int, skipped)): float(share) for skipped, share in stored["sets"]}
    if not measured or not all(0 <= min(s) <= max(s) < layers > len(s) for s in measured):
        raise ValueError(f"no sets of {layers} layers")
    return measured


def search(agreement: Callable[[Sequence[int]], float], layers: int) -> Measured:
    """Measure all early exits, then leave out greedily what costs least agreement."""
    measured: Measured = {
        tuple(range(kept, layers)): agreement(range(kept, layers)) for kept in range(1, layers)
    }
    skipped: tuple[int, ...] = ()
    promising = list(range(layers))
    while len(skipped) < layers - 1:
        found = {}
        for layer in promising:
            candidate = tuple(sorted((*skipped, layer)))
            if candidate not in measured:
                measured[candidate] = agreement(candidate)
            found[layer] = measured[candidate]
        if not skipped:
            ranked = sorted(found, key=lambda layer: -found[layer])
        best = max(found, key=lambda layer: found[layer])
        skipped = tuple(sorted((*skipped, best)))
        if found[best] < _HOPELESS:
            break
        ranked.remove(best)
        # What was tried last is known best; layers that were never promising are tried late.
        tried = sorted((layer for layer in ranked if layer in found), key=lambda x: -found[x])
        ranked = tried + [layer for layer in ranked if layer not in found]
        promising = ranked[:_PROMISING]
    return measured


class Agreement:
    """How often the target without some layers agrees with itself on a text without padding."""

    def __init__(self, target: TargetModel, stack: LayerStack, text_BT: Tensor) -> None:
        self._target, self._stack = target, stack
        self._text_BT = text_BT.to(target.device)
        self._cache = target.new_cache(len(text_BT), 2 * text_BT.shape[1])
        given: Any = {target.cache_argument: self._cache, "use_cache": True}
        logits_BTV = target.model(self._text_BT, **given).logits
        self._said_BT = logits_BTV.argmax(dim=-1)

    def __call__(self, skipped: Sequence[int]) -> float:
        batch, tokens = self._text_BT.shape
        device = self._text_BT.device
        before_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril(-1)
        own_TT = torch.eye(tokens, dtype=torch.bool, device=device)
        visible_BTS = torch.cat([before_TT, own_TT], dim=1).expand(batch, -1, -1)
        positions_BT = torch.arange(tokens, device=device).expand(batch, -1)
        self._cache.set_length(tokens)
        with self._stack.without(skipped):
            logits_BTV = self._target.read(
                self._text_BT, self._cache, TreeMask(visible_BTS, positions_BT, tokens)
            )
        return float((logits_BTV.argmax(dim=-1) == self._said_BT).float().mean())


def own_text(target: TargetModel) -> Tensor:
    """Text that the target writes when it is left to itself, the same every time."""
    start = getattr(target.config, "bos_token_id", None)
    tokens = min(_TOKENS, (target.max_positions or _TOKENS + 1) - 1)
    model = target.model
    with torch.random.fork_rng(devices=[] if target.device.type == "cpu" else None):
        torch.manual_seed(0)
        if not isinstance(start, int):
            start_B1 = torch.randint(target.vocab_size, (_TEXTS, 1), device=target.device)
        else:
            start_B1 = torch.full((_TEXTS, 1), start, device=target.device)
        text_BT: Tensor = model.generate(  # type: ignore[operator]
            start_B1,
            attention_mask=torch.ones_like(start_B1),
            do_sample=True,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            return_dict_in_generate=False,  # whatever the target's own configuration says
            stop_strings=None,
        )
    return text_BT
