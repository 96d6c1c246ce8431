"""The decoding loop: draft a tree, verify it in one forward, keep the accepted path.

Shapes: B active rows, T tokens, N tree nodes, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from medusa_heads.cache_names import cache_field
from medusa_heads.inference.acceptance import AcceptanceRule
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.beginning import Beginning, finish_step
from medusa_heads.inference.engine.device_loop import device_loop
from medusa_heads.inference.engine.given.cache import give_back
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:
    from transformers.generation.utils import GenerateDecoderOnlyOutput

_WARM_UP = 3  # forwards of a text, its prompt's included, before steps take what they will


class Exchange(ABC):
    """Decides through which view of its target a text is decoded further, before every step."""

    @abstractmethod
    def due(self, state: DecodingState, slots: int) -> bool:
        """Whether to ask for another view; the text may come to need so many cache slots."""

    @abstractmethod
    def view(self, state: DecodingState, slots: int) -> tuple[TargetModel, Drafter] | None:
        """Another view of the same target, and its drafter; None where there is none after all."""


@torch.no_grad()
def decode(
    target: TargetModel,
    drafter: Drafter,
    input_ids_BT: Tensor,
    *,
    generation_config: GenerationConfig,
    streamer: Any = None,
    stats: GenerationStats | None = None,
    exchange: Exchange | None = None,
    **prepared: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode the way transformers' own `_sample` does, several tokens a forward. Takes what
    `generate()` prepares for a decoding method and the other options of `Beginning`, and returns
    what it would. Raises ValueError: an option that tree decoding cannot honour, by name."""
    stats = GenerationStats() if stats is None else stats
    started = time.perf_counter()
    beginning = Beginning(
        target,
        drafter,
        input_ids_BT,
        generation_config=generation_config,
        streamer=streamer,
        **prepared,
    )
    state, rule, slots = beginning.state, beginning.rule, beginning.slots
    rows, recorder = state.rows, beginning.recorder
    stats.lossless = rule.lossless
    if streamer is not None:
        streamer.put(input_ids_BT.cpu())

    with ExitStack() as capturing, _kept_sound(state, stats):
        last_hidden = capturing.enter_context(target.capture_hidden())
        beginning.read_prompts(last_hidden, stats)
        # Cheaper than no_grad by several percent of a small target's step. Not where accelerate
        # moves weights in the middle of a forward: they would be left as inference tensors.
        with torch.no_grad() if hasattr(target.model, "_hf_hook") else torch.inference_mode():
            # To graphs, what was made outside is another kind of tensor.
            state.roots_B, state.hidden_BD = state.roots_B.clone(), state.hidden_BD.clone()
            plain = recorder is None and exchange is None
            if plain and beginning.in_whole_steps:
                on_device = device_loop(target, drafter, rule, state, beginning.ends)
                if on_device is not None:
                    on_device(stats)
            while state.rows:
                if exchange is not None and exchange.due(state, slots):
                    capturing.close()  # what is compiled knows of no hook but its own
                    if (other := exchange.view(state, slots)) is not None:
                        target, drafter = other
                        state.move_to(target.new_cache(len(state.rows), slots))
                    last_hidden = capturing.enter_context(target.capture_hidden())
                if state.is_read_again:
                    beginning.read_again(last_hidden, stats)
                else:
                    take_step(target, drafter, rule, state, last_hidden, stats)

    give_back(state.cache, beginning.given)
    if streamer is not None:
        streamer.end()
    stats.tokens = sum(len(row.tokens) for row in rows)
    stats.total_seconds = time.perf_counter() - started
    sequences_BT = _sequences(input_ids_BT, rows, generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences_BT
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    output: dict[str, Any] = {"sequences": sequences_BT}
    if len(rows) == 1:  # rows of a batch end at different lengths and leave the cache as they end
        output[cache_field()] = state.cache.handed_out(target.config)
    if recorder and generation_config.output_scores:
        output["scores"] = recorder.given("scores")
    if recorder and generation_config.output_logits:
        output["logits"] = recorder.given("logits")
    return GenerateDecoderOnlyOutput(**output)


@contextmanager
def _kept_sound(state: DecodingState, stats: GenerationStats) -> Iterator[None]:
    """Also a caller's own cache ends with what was committed, or with what was when the text left
    it, whatever is raised in the block."""
    given, broke_off = state.cache.get_seq_length(), True
    try:
        yield
        broke_off = False
    finally:
        if broke_off and not state.cache.can_go_back:
            state.cache.reset()  # nobody can say what its states have read
        else:
            state.cache.set_length(max(state.lengths) if stats.forwards else given)


def take_step(
    target: TargetModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    state: DecodingState,
    last_hidden: Callable[[], Tensor],
    stats: GenerationStats,
) -> None:
    """One step of all rows: draft, verify, keep."""
    with stats.phase("draft"):
        drafted = None if _goes_alone(state, drafter) else state.draft(drafter)
        tree = TokenTree.root_only(state.roots_B) if drafted is None else drafted
    started = time.perf_counter()
    with stats.phase("target"):
        logits_BNV = state.verify(target, tree)
        hidden_BND = state.of_nodes(last_hidden(), tree.num_nodes)
    verified = time.perf_counter()
    with stats.phase("walk"):
        paths = rule(tree, logits_BNV, state.rows)
        walked = time.perf_counter()
        if drafted is not None:
            drafter.observe(tree, logits_BNV)
    with stats.phase("cache"):
        state.keep(paths)
        finish_step(state, paths, hidden_BND, stats)
    usual = stats.forwards > _WARM_UP and not target.looks
    if usual and drafted is not None and state.room is None:
        seconds = time.perf_counter() - started
        if logits_BNV.device.type == "cpu":  # elsewhere the walk also waits for the target
            # What every token takes is no reason to commit fewer of them: of a level of the walk
            # for each token of a mean row.
            levels, further = max(map(len, paths)), [len(path) - 1 for path in paths if path]
            seconds -= (walked - verified) * sum(further) / len(further) / levels
        drafter.learn_seconds(tree.num_nodes - 1, seconds)


def _goes_alone(state: DecodingState, drafter: Drafter) -> bool:
    """Whether the next step is without drafts, which the drafter is told."""
    rule, depth = state.position_rule, drafter.num_nodes - 1
    if rule is None or not rule.reads_alone(state.lengths, state.padding, depth):
        return False
    drafter.rest(state)
    return True


def _sequences(prompt_BT: Tensor, rows: list[Row], config: GenerationConfig) -> Tensor:
    """All rows, right-padded to the longest, as generate() returns them."""
    longest = max(len(row.tokens) for row in rows)
    pad = config._pad_token_tensor
    fill = int(pad) if pad is not None else 0
    new = [row.tokens + [fill] * (longest - len(row.tokens)) for row in rows]
    return torch.cat([prompt_BT, torch.tensor(new, device=prompt_BT.device)], dim=1)
