"""What a target makes of a small tree: numbers on which it is trusted, or not.

Four forwards: a text, a tree behind it, paths of that tree read plainly, and the same tree with
other tokens on some of its branches. Every node so stands against a plain forward of its own path,
and against itself beside other branches.

Shapes: P paths, T tokens, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteriaList

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.cache_names import cache_of
from medusa_heads.config import RankPath
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.recurrent import decoding_state
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.target.positions import scales_by_slot
from medusa_heads.target.scans import OfThread
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TreeShape

_PROMPT = 24
_LARGEST_WINDOW_PROBED = 128
# Forwards of one shape do not even round differently, in any dtype: what a node must not see
# changes nothing of it, or 1e-6 where an expert is handed another number of tokens. One scale for
# all activations in 8 bits shifts even tiny narrow models by 5e-3, a mask not followed by 0.1.
_LEAK_TOLERANCE = (1e-4, 2e-3)
_PATH = 4  # tokens
_NO_EFFECT = 1e-6  # of a plain forward: tokens that were never trained may all be embedded alike


@dataclass(frozen=True)
class Trial:
    """A tree to verify, and what of it is changed."""

    shape: TreeShape
    # For every further forward, the nodes that then hold other tokens. What has none of them on its
    # path must stay as it is; what keeps its own token behind one of them must not.
    changed: Sequence[Collection[RankPath]]
    leaves: Sequence[RankPath]  # whose paths are read plainly as well; all equally deep


# Siblings at every depth, and paths whose nodes do and do not lie side by side in the cache.
TREE = Trial(
    TreeShape.from_choices(
        [(b, *behind) for b in range(3) for behind in ((), (0,), (0, 0), (1,), (1, 0))]
    ),
    [{(0, 0, 0), (0, 1), (1, 0), (1, 0, 0), (2,), (2, 0), (2, 1), (2, 1, 0)}],
    [(0, 0, 0), (0, 1, 0), (1, 1, 0), (2, 0, 0)],
)
_DRAFTED = ((0,), (0, 0), (0, 0, 0))  # the first nodes of the tree as well: they are read once
CHAIN = Trial(TreeShape.from_choices(_DRAFTED), [_DRAFTED, _DRAFTED[:2]], _DRAFTED[2:])


@dataclass(frozen=True)
class Probe:
    """What a target made of a small tree, in standard deviations of the logits."""

    error: float  # worst difference of a node from a plain forward of its path
    leak: float  # worst change of a node when only tokens change that it must not see
    effect: float  # least change of a leaf when tokens change that it must see

    def fault(self, dtype: torch.dtype) -> str | None:
        """What speaks against verifying such trees; None if nothing does."""
        half = is_half(dtype)
        if not self.error <= TOLERANCE[half]:  # NaN is no agreement
            return f"its logits differ from plain decoding by {self.error:.2g} standard deviations"
        if not self.leak <= _LEAK_TOLERANCE[half]:
            return (
                f"a token's logits change by {self.leak:.2g} standard deviations with tokens that "
                "it must not see: the tree's mask is not followed, or all activations of a forward "
                "share one scale"
            )
        if not self.effect > self.leak:
            return "a token's logits do not change with the tokens before it"
        return None


class Prober:
    """Verifies small random trees behind a random text that is longer than any small attention
    window."""

    @torch.no_grad()
    def __init__(self, target: TargetModel) -> None:
        window = getattr(target.config, "sliding_window", None)
        chunk = getattr(target.config, "attention_chunk_size", None)
        small = [size for size in (window, chunk) if size and size <= _LARGEST_WINDOW_PROBED]
        past = max([_PROMPT, *(size + _PROMPT // 2 for size in small)])
        nodes, vocab = TREE.shape.num_nodes, target.vocab_size
        random = torch.Generator().manual_seed(0)
        here: Any = {"generator": random, "device": "cpu"}  # whatever torch's default device is
        ids_1T = torch.randint(vocab, (1, past + nodes), **here).to(target.device)
        other_1N = torch.randint(1, max(vocab, 2), (1, nodes), **here).to(target.device)
        self._target = target
        self._prompt_1T, self._nodes_1N = ids_1T[:, :past], ids_1T[:, past:]
        self._others_1N = (self._nodes_1N + other_1N) % vocab  # none the same
        self._known_plain: dict[RankPath, Tensor] = {}  # logits [T, V] along the path to a leaf
        cache = target.new_cache(1, past + nodes)
        target.model(
            self._prompt_1T,
            **_positions(target, self._prompt_1T),
            **{target.cache_argument: cache},
            use_cache=True,
        )
        if cache.row_layers and cache.get_seq_length() != past:
            raise UnsupportedArchitecture(
                f"{target.config.model_type} does not keep its text in the cache it is given"
            )
        row = Row(0, 1, self._prompt_1T[0], StopCheck(StoppingCriteriaList()))
        self._state = decoding_state([row], cache, [0])
        self._state.hidden_BD = torch.zeros(
            1, target.hidden_size, dtype=target.dtype, device=target.device
        )

    @torch.no_grad()
    def probe(self, trial: Trial) -> Probe:
        """What the target makes of a tree."""
        shape = trial.shape
        nodes_1N = self._nodes_1N[:, : shape.num_nodes]
        logits_NV = self._verified(shape, nodes_1N)
        paths = {leaf: shape.ancestors_NN[shape.choices.index(leaf) + 1] for leaf in trial.leaves}
        new = {leaf: path_N for leaf, path_N in paths.items() if leaf not in self._known_plain}
        if new:  # all of them in one forward
            paths_PT = torch.stack([nodes_1N[0, path_N] for path_N in new.values()])
            self._known_plain |= dict(zip(new, self._read(paths_PT), strict=True))
        errors = [
            relative_error(logits_NV[path_N], self._known_plain[leaf])
            for leaf, path_N in paths.items()
        ]
        leaks, effects = [0.0], []
        for changed in trial.changed:
            changed_N = torch.tensor(
                [path in changed for path in [(), *shape.choices]], device="cpu"
            )
            others_1N = self._others_1N[:, : shape.num_nodes]
            tokens_1N = others_1N.where(changed_N.to(others_1N.device), nodes_1N)
            after_NV = self._verified(shape, tokens_1N)
            sees_N = (shape.ancestors_NN & changed_N).any(dim=1)
            leaks.append(relative_error(after_NV[~sees_N], logits_NV[~sees_N]))
            for node in (sees_N & ~changed_N).nonzero().flatten().tolist():
                effect = relative_error(after_NV[[node]], logits_NV[[node]])
                path_N = shape.ancestors_NN[node]
                alike = nodes_1N[:, path_N], tokens_1N[:, path_N]
                if effect <= max(leaks) and self._are_alike(*alike):
                    effect = float("inf")
                effects.append(effect)
        return Probe(max(errors), max(leaks), min(effects))

    @torch.no_grad()
    def own_error(self) -> float:
        """By how much the target's own forwards differ, in standard deviations of the logits: of
        tokens that are read one by one, and of the whole text."""
        tokens_1T, past = self._nodes_1N[:, :_PATH], self._prompt_1T.shape[1]
        text_1T = torch.cat([self._prompt_1T, tokens_1T], dim=1)
        positions = _positions(self._target, text_1T)
        cache: Any = None
        logits: list[Tensor] = []
        for new in (slice(past), *(slice(end, end + 1) for end in range(past, past + _PATH))):
            at: dict[str, Any] = {name: of_1T[:, new] for name, of_1T in positions.items()}
            if cache is not None:
                at[self._target.cache_argument] = cache
            output: Any = self._target.model(text_1T[:, new], use_cache=True, **at)
            cache = cache_of(output)
            logits.append(output.logits[0, -1:].float())
        return relative_error(torch.cat(logits[1:]), self._read(tokens_1T)[0])

    def _verified(self, shape: TreeShape, tokens_1N: Tensor) -> Tensor:
        """Logits [N, V] of every node."""
        tree, state = shape.tree(tokens_1N), self._state
        logits_NV = state.verify(self._target, tree)[0].float()
        state.forget()
        return logits_NV

    def _read(self, paths_PT: Tensor) -> Tensor:
        """Logits [P, T, V] of these tokens behind the text, without a cache or a tree."""
        ids_PT = torch.cat([self._prompt_1T.expand(len(paths_PT), -1), paths_PT], dim=1)
        return text_logits(self._target, ids_PT)[:, self._prompt_1T.shape[1] :].float()

    def _are_alike(self, one_1T: Tensor, other_1T: Tensor) -> bool:
        """Whether the target itself goes on alike after both, and so has nothing to see."""
        one_TV, other_TV = self._read(one_1T)[0], self._read(other_1T)[0]
        return relative_error(other_TV[-1:], one_TV[-1:]) <= _NO_EFFECT


# How much is chosen, by the names that indexers give it. Some thousand tokens are, and so all of a
# short text, whatever an indexer makes of a tree.
_FEW = {"index_topk": 8, "topk_blocks": 2, "block_topk": 2, "block_size": 4, "compress_ratio": 4}
_SCALED_ALIKE = 1  # slots whose queries are scaled alike, of some thousand
# What modules are told in this thread in place of their own numbers, by module and name.
_NARROWED: ContextVar[dict[tuple[int, str], int] | None] = ContextVar("narrowed", default=None)


def _narrowed(name: str, module: nn.Module, number: Any) -> Any:
    # No model is compiled while it is tried, and a compiler reads no ContextVar.
    others = None if torch.compiler.is_compiling() else _NARROWED.get()
    return (others or {}).get((id(module), name), number)


def indexers(target: TargetModel) -> list[nn.Module]:
    """The modules that choose which rows attention reads, and can be told how many."""
    modules = [m for m in target.model.modules() if type(m).__name__.endswith("Indexer")]
    return [m for m in modules if vars(m).keys() & _FEW.keys()]


@contextmanager
def few_rows_chosen(target: TargetModel) -> Iterator[None]:
    """Within the block, indexers leave out most of a short text as well, and what scales queries by
    the slot does so in a short text. Forwards of other threads are left alone."""
    scaling = [m for m in target.model.modules() if scales_by_slot(m)]
    settings_of = (indexers(target), _FEW), (scaling, {"floor_scale": _SCALED_ALIKE})
    narrowed = dict(_NARROWED.get() or {})
    for modules, settings in settings_of:
        for module in modules:
            for name in vars(module).keys() & settings.keys():
                if not isinstance(vars(type(module)).get(name), OfThread):
                    setattr(type(module), name, OfThread(name, partial(_narrowed, name)))
                narrowed[id(module), name] = min(vars(module)[name], settings[name])
    token = _NARROWED.set(narrowed)
    try:
        yield
    finally:
        _NARROWED.reset(token)


def takes_positions(target: TargetModel) -> bool:
    """Whether the target is told where in the text its tokens stand."""
    return "position_ids" in inspect.signature(target.model.forward).parameters


def text_logits(target: TargetModel, ids_PT: Tensor) -> Tensor:
    """Behind each token of whole texts, by a forward of its own, [P, T, V]."""
    given = {"input_ids": ids_PT, **_positions(target, ids_PT)}
    logits_PTV: Tensor = target.model(**given, use_cache=False).logits
    return logits_PTV


def _positions(target: TargetModel, ids_PT: Tensor) -> dict[str, Tensor]:
    """Explicit, as generate() passes them: left alone, RoBERTa and kin count from the padding id
    on."""
    if not takes_positions(target):
        return {}
    positions_T = torch.arange(ids_PT.shape[1], device=target.device)
    return {"position_ids": positions_T.expand(ids_PT.shape)}
