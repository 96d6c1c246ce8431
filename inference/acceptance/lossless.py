"""The exact acceptance rule: sample, then match.

Shapes: B active rows, W rows still walking, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import (
    RowProcessors,
    Settings,
    greediest,
    leaves_all,
    look_at_scores_alone,
    look_at_tokens_alone,
    row_processors,
    warp,
)
from medusa_heads.inference.acceptance.likeliest import Likeliest
from medusa_heads.inference.engine.given.own_code import as_generate_runs_it
from medusa_heads.inference.engine.noise import NO_TOKEN, Noise
from medusa_heads.inference.engine.rows import Row
from medusa_heads.trees.tree import TokenTree


class SampleThenMatch:
    """The exact rule for drafts chosen deterministically.

    At each node the target's own next token is drawn from its own (processed) distribution; a child
    that carries this token is descended to, otherwise the token is the bonus. Whatever was drafted,
    every committed token so comes from the target, in order. Greedy is the same walk with argmax.

    Tokens are drawn by keyed noise, where `noise` is set: drafters then know what is about to be
    drawn, and a seed's text depends on the target and its prompt alone, not on drafts, trees, other
    rows, or padding. Else they are drawn with the random numbers that generate() would have used:
    same seed, same tokens (of a batch, as long as its rows keep in step).

    All rows walk their trees side by side, a node each at a time, and are drawn for at once: the
    host waits for the device once a level, however large the batch.
    Processors are run on walked nodes only.

    Attributes:
        processors: transformers' logits processors and warpers that do not leave all tokens.
    """

    lossless = True
    settings: ClassVar[Settings] = {}
    noise: Noise | None = None

    def __init__(self, processors: LogitsProcessorList, do_sample: bool) -> None:
        processors = LogitsProcessorList(each for each in processors if not leaves_all(each))
        self.processors = processors
        self._do_sample = do_sample
        self._at_once = look_at_scores_alone(processors)
        self._likeliest = Likeliest.of(processors)
        self._of_row: list[RowProcessors] = []

    def draws_at_once(self, rows: Sequence[Row]) -> bool:
        """Whether `at_once` says what the walk of these would commit."""
        keyed = self.noise is not None or not self._do_sample
        return keyed and look_at_tokens_alone(self.processors, rows)

    def __call__(self, tree: TokenTree, logits_BNV: Tensor, rows: Sequence[Row]) -> list[list[int]]:
        if self._is_plain(rows) and _runs_ahead(logits_BNV.device):
            # All nodes at once, and a single wait for the device. On a CPU nobody waits, and the
            # walked nodes alone are less work.
            greedy_BN = greediest(logits_BNV)
            tokens, parents, greedy = torch.stack(
                [tree.tokens_BN, tree.parents_BN, greedy_BN]
            ).tolist()
        else:
            tokens, parents = torch.stack([tree.tokens_BN, tree.parents_BN]).tolist()
            greedy = None
        paths: list[list[int]] = [[] if row.done else [0] for row in rows]
        walking = [b for b, path in enumerate(paths) if path]
        while walking:
            nodes = [paths[b][-1] for b in walking]
            if greedy is not None:
                drawn = [greedy[b][node] for b, node in zip(walking, nodes, strict=True)]
            else:
                drawn = self._draw(logits_BNV, rows, walking, nodes)
            further = []
            for b, node, token in zip(walking, nodes, drawn, strict=True):
                if (watch := rows[b].watch) is not None:
                    watch(logits_BNV[b, node], token)
                if rows[b].commit(token):
                    continue
                child = _child(tokens[b], parents[b], node, token)
                if child is not None:
                    paths[b].append(child)
                    further.append(b)
            walking = further
        return paths

    def _is_plain(self, rows: Sequence[Row]) -> bool:
        """Whether the logits' argmax is all that is asked for."""
        return not (self._do_sample or self.processors or any(row.recorder for row in rows))

    def _draw(
        self, logits_BNV: Tensor, rows: Sequence[Row], walking: Sequence[int], nodes: Sequence[int]
    ) -> list[int]:
        """The target's next token behind a node of each of the walking rows."""
        walked = [rows[b] for b in walking]
        if self._is_plain(walked):
            return greediest(_of_nodes(logits_BNV, walking, nodes)).tolist()
        drawn: list[int | None] = [None] * len(walked)
        among, noise = self._likeliest, self.noise
        on_host = not _runs_ahead(logits_BNV.device)  # elsewhere a look at scores is a wait
        if among and noise and on_host and among.pays(len(walked), logits_BNV.shape[2]):
            drawn = among.draw(noise, walked, _of_nodes(logits_BNV, walking, nodes))
        unsure = [i for i, token in enumerate(drawn) if token is None]
        left = [walking[i] for i in unsure], [nodes[i] for i in unsure]
        among_all = iter(self._draw_among_all(logits_BNV, rows, *left) if unsure else ())
        return [next(among_all) if token is None else token for token in drawn]

    def _draw_among_all(
        self, logits_BNV: Tensor, rows: Sequence[Row], walking: Sequence[int], nodes: Sequence[int]
    ) -> list[int]:
        """What `_draw` draws, by the processed scores of all tokens."""
        walked = [rows[b] for b in walking]
        if self._at_once and len(walking) > 1:
            ids: Any = walked[0].ids_1T()  # nothing here reads more of it than its device
            logits_WV = _of_nodes(logits_BNV, walking, nodes)
            logits_WV = logits_WV.to(dtype=torch.float32, device=ids.device)
            scores_WV = warp(self.processors, ids, logits_WV)
        else:
            places = zip(walking, nodes, strict=True)
            scores_WV = torch.cat(
                [self._scores(logits_BNV[b], rows[b], node) for b, node in places]
            )
        drawn: list[int] = self._pick(scores_WV, walked).tolist()
        check_drawn(drawn)
        return drawn

    def _pick(self, scores_WV: Tensor, rows: Sequence[Row]) -> Tensor:
        """The next token [W] of each of these rows, by its processed scores."""
        if not self._do_sample:
            return scores_WV.argmax(dim=-1)
        if self.noise is not None:
            return self.noise.draw(rows, scores_WV)
        probs_WV = torch.softmax(scores_WV, dim=-1)
        return torch.multinomial(probs_WV, num_samples=1)[:, 0]

    def _scores(self, logits_NV: Tensor, row: Row, node: int) -> Tensor:
        """What the processors make of a node's logits, [1, V] in fp32, and recorded if asked."""
        with as_generate_runs_it():
            ids: Any = row.ids_1T()
            # In fp32 and on the ids' device, as generate() hands logits to the processors.
            logits: Any = logits_NV[node, None].to(
                copy=True, dtype=torch.float32, device=ids.device
            )
            # Processors may write into what they are given.
            raw = logits.clone() if row.recorder else logits
            self._of_row = self._of_row or row_processors(self.processors, row.batch_size)
            scores_1V = self._of_row[row.index](ids, logits)
            if row.recorder:
                row.recorder.record(scores_1V, raw)
        return scores_1V


def check_drawn(tokens: Sequence[int]) -> None:
    """Raises ValueError where a token could not be drawn, as multinomial refuses to."""
    if NO_TOKEN in tokens:
        raise ValueError(
            "the processed scores of a next token are no distribution: each is -inf, or some "
            "are inf or nan"
        )


def _of_nodes(logits_BNV: Tensor, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
    """The logits of one node of each of these rows, for reading alone."""
    batch, count, _ = logits_BNV.shape
    if len(rows) == 1:
        return logits_BNV[rows[0], nodes[0], None]
    if len(rows) == batch and not any(nodes):  # all walk from the root
        return logits_BNV[:, 0]
    places = [row * count + node for row, node in zip(rows, nodes, strict=True)]
    places_W = torch.tensor(places, device=logits_BNV.device)
    return logits_BNV.flatten(0, 1).index_select(0, places_W)


def _runs_ahead(device: torch.device) -> bool:
    """Whether the host goes on while the device works, and waits when it reads a result."""
    return device.type != "cpu"


def _child(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None
