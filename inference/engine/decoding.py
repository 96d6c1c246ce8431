"""The decoding loop: draft a tree, verify it in one forward, keep the accepted path.

Shapes: B active rows, T tokens, N tree nodes, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from medusa_heads.inference.acceptance import AcceptanceRule, SampleThenMatch, make_rule
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.capability import capability, check_batch
from medusa_heads.inference.engine.device_loop import device_loop
from medusa_heads.inference.engine.exchange import Exchange
from medusa_heads.inference.engine.noise import Noise, Rng
from medusa_heads.inference.engine.recurrent import decoding_state
from medusa_heads.inference.engine.requests import (
    check_positions,
    left_padding,
    refuse_unsupported,
)
from medusa_heads.inference.engine.rows import Row, ScoreRecorder, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.cache import RowCache
from medusa_heads.target.recurrent import refuse_states_alone
from medusa_heads.target.scans import scans_go_on
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:
    from transformers.generation.utils import GenerateDecoderOnlyOutput

_WARM_UP = 3  # forwards of a text, its prompt's included, before steps take what they will


@torch.no_grad()
def decode(
    target: TargetModel,
    drafter: Drafter,
    input_ids_BT: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any = None,
    acceptance: str = "lossless",
    acceptance_settings: Mapping[str, float] | None = None,
    rng: Rng = "keyed",
    stats: GenerationStats | None = None,
    exchange: Exchange | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode the way transformers' own `_sample` does, several tokens a forward.

    Takes what `generate()` prepares for a decoding method, and returns what it would.

    Raises:
        ValueError: an option that tree decoding cannot honour, by name.
    """
    stats = GenerationStats() if stats is None else stats
    started = time.perf_counter()
    refuse_unsupported(generation_config, model_kwargs)
    padding = left_padding(input_ids_BT, model_kwargs.get("attention_mask"))
    check_positions(model_kwargs.get("position_ids"), padding)
    trusted = capability(target)
    check_batch(target, padding)
    batch = input_ids_BT.shape[0]
    stop = StopCheck(stopping_criteria, batch)
    recorder = _recorder(generation_config, batch, acceptance)
    rows = [
        Row(i, batch, prompt_T, stop, streamer, recorder) for i, prompt_T in enumerate(input_ids_BT)
    ]
    do_sample = bool(generation_config.do_sample)
    rule = make_rule(acceptance, logits_processor, do_sample, **(acceptance_settings or {}))
    stats.lossless = rule.lossless
    if streamer is not None:
        if len(rows) > 1:
            raise ValueError("a streamer takes one sequence: pass a batch of 1, or no streamer")
        streamer.put(input_ids_BT.cpu())

    slots = int(generation_config.max_length or 0) + drafter.num_nodes
    if trusted == "recurrent":  # which reads tokens again behind the longest row
        slots += drafter.num_nodes + drafter.most_again(batch)
    cache = _own_cache(target, model_kwargs, batch, slots)
    state = decoding_state(
        rows, cache, padding, generation_config.max_length, keeps_fresh=drafter.reads_prompt
    )
    with ExitStack() as capturing, _kept_sound(state, stats):
        last_hidden = capturing.enter_context(target.capture_hidden())
        with stats.phase("prefill"):
            state.warpers = logits_processor if do_sample else None
            if do_sample and rng == "keyed" and isinstance(rule, SampleThenMatch):
                # Drawn once a call, so that the next call draws anew.
                seed = int(torch.randint(1 << 62, (), device="cpu"))
                state.noise = rule.noise = Noise(seed, rows, padding)
            reading: AbstractContextManager[list[Tensor]] = nullcontext([])
            if drafter.reads_prompt:
                reading = target.capture_prompt()
                model_kwargs.pop("logits_to_keep", None)
            # A cache that was returned earlier holds states to go on from.
            with reading as prompt_hidden, scans_go_on(target.model, cache.layers):
                # transformers' own: chunked, or from a cache.
                model: Any = target.model
                prefilled = model._prefill(input_ids_BT, generation_config, model_kwargs)
                logits_BV = prefilled.logits[:, -1]
            # Read at once: a logits processor may run the model itself.
            hidden_B1D = last_hidden()[:, -1:]
            if cache.row_layers and cache.get_seq_length() != input_ids_BT.shape[1]:
                raise ValueError(
                    f"the given cache and the {input_ids_BT.shape[1]} given tokens make "
                    f"{cache.get_seq_length()} tokens: pass the whole text, not only what is new"
                )
        with stats.phase("walk"):
            # The prompt's last token is a tree of one node, verified by the prefill.
            prompt = TokenTree.root_only(input_ids_BT[:, -1])
            drafter.observe(prompt, logits_BV[:, None])
            _finish_step(state, rule(prompt, logits_BV[:, None], rows), hidden_B1D, stats)
            if prompt_hidden:
                state.take_prompt(torch.cat(prompt_hidden, dim=1))
        # Cheaper than no_grad by several percent of a small target's step. Not where accelerate
        # moves weights in the middle of a forward: they would be left as inference tensors.
        with torch.inference_mode(not hasattr(target.model, "_hf_hook")):
            if trusted == "tree" and streamer is None and recorder is None and exchange is None:
                on_device = device_loop(target, drafter, rule, state, stop.ends)
                if on_device is not None:
                    on_device(stats)
            while state.rows:
                if exchange is not None and exchange.due(state, slots):
                    capturing.close()  # what is compiled knows of no hook but its own
                    if (other := exchange.view(state, slots)) is not None:
                        target, drafter = other
                        state.move_to(target.new_cache(len(state.rows), slots))
                    last_hidden = capturing.enter_context(target.capture_hidden())
                _step(target, drafter, rule, state, last_hidden, stats)

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
        output["past_key_values"] = state.cache.handed_out(target.config)
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


def _step(
    target: TargetModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    state: DecodingState,
    last_hidden: Any,
    stats: GenerationStats,
) -> None:
    with stats.phase("draft"):
        drafted = state.draft(drafter)
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
        _finish_step(state, paths, hidden_BND, stats)
    if stats.forwards > _WARM_UP and drafted is not None and state.room is None:
        seconds = time.perf_counter() - started
        if logits_BNV.device.type == "cpu":  # elsewhere the walk also waits for the target
            # What every token takes is no reason to commit fewer of them.
            seconds -= (walked - verified) * (1 - 1 / max(map(len, paths)))
        drafter.learn_seconds(tree.num_nodes - 1, seconds)


def _finish_step(
    state: DecodingState, paths: list[list[int]], hidden_BND: Tensor, stats: GenerationStats
) -> None:
    for row, path in zip(state.rows, paths, strict=True):
        if path:
            row.end_step()
    stats.steps += sum(1 for path in paths if path)
    stats.accepted.update(len(path) - 1 for path in paths if path)
    stats.forwards += 1
    state.advance(hidden_BND, paths)


def _recorder(config: GenerationConfig, batch: int, acceptance: str) -> ScoreRecorder | None:
    if not config.return_dict_in_generate or not (config.output_scores or config.output_logits):
        return None
    if batch > 1 or acceptance != "lossless":
        raise ValueError(
            "output_scores and output_logits need a batch of 1 and lossless acceptance: a step "
            "commits unequal numbers of tokens to the rows of a batch"
        )
    return ScoreRecorder()


def _own_cache(
    target: TargetModel, model_kwargs: dict[str, Any], batch: int, slots: int
) -> RowCache:
    given = model_kwargs.get(target.cache_argument)
    cache = target.new_cache(batch, slots)
    # One without rows does not say how much it has read.
    if type(given) is type(cache) and cache.fixed_capacity is None and cache.row_layers:
        cache = given
        cache.announce(slots)
    elif given is not None:
        refuse_states_alone(given)
        cache.take_over(given)
    model_kwargs[target.cache_argument] = cache
    return cache


def _sequences(prompt_BT: Tensor, rows: list[Row], config: GenerationConfig) -> Tensor:
    """All rows, right-padded to the longest, as generate() returns them."""
    longest = max(len(row.tokens) for row in rows)
    pad = config._pad_token_tensor
    fill = int(pad) if pad is not None else 0
    new = [row.tokens + [fill] * (longest - len(row.tokens)) for row in rows]
    return torch.cat([prompt_BT, torch.tensor(new, device=prompt_BT.device)], dim=1)
