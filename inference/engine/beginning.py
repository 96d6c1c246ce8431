"""How a text begins: what generate() has prepared is checked, and the target reads the prompts.

Shapes: B rows, T tokens, N tree nodes, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from medusa_heads.inference.acceptance import SampleThenMatch, make_rule
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.capability import capability, check_batch
from medusa_heads.inference.engine.given.arguments import (
    check_positions,
    check_tokens,
    left_padding,
    limited,
    on_device,
    refuse_unsupported,
)
from medusa_heads.inference.engine.given.cache import own_cache
from medusa_heads.inference.engine.given.media import (
    goes_on_behind_media,
    has_media,
    names_of_media,
    positions_ahead,
    positions_given,
)
from medusa_heads.inference.engine.noise import Noise, Rng
from medusa_heads.inference.engine.recurrent import decoding_state
from medusa_heads.inference.engine.rows import Row, ScoreRecorder, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.positions import position_rule
from medusa_heads.target.scans import scans_go_on
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree


class Beginning:
    """Rows whose prompts are about to be read.

    Takes what `generate()` prepares for a decoding method, in `model_kwargs` too. Raises
    ValueError: an option that tree decoding cannot honour, by name.

    Args:
        acceptance, acceptance_settings, rng: see AssistedModel.
        among: how many rows these may come to be decoded with; by default themselves alone.
        random: what the seed of keyed noise is drawn from. Default: as torch's own generator goes.

    Attributes:
        state: where the rows stand.
        rule: which of their drafts are kept.
        in_whole_steps: whether steps may be taken whole: not where the target goes by cache slots.
        ends: the tokens that end a text; None where other things do.
        slots: that the text may come to need in the cache.
        recorder: of scores and logits, where they were asked for.
        given: the caller's own cache, to be filled at the end.
    """

    def __init__(
        self,
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
        among: int | None = None,
        random: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> None:
        config = limited(generation_config, stopping_criteria)
        model: Any = target.model
        own = model.generation_config
        refuse_unsupported(config, own, model_kwargs, names_of_media(model))
        model_kwargs["use_cache"] = True
        input_ids_BT = on_device(input_ids_BT, model_kwargs, target.device)
        self._media = has_media(model, model_kwargs)
        # What stands for an image may be a token that is no text's.
        check_tokens(input_ids_BT, None if self._media else target.readable)
        padding = left_padding(input_ids_BT, config, model_kwargs)
        tokens = input_ids_BT.shape[1]
        self._media = self._media or goes_on_behind_media(model, model_kwargs, tokens, padding)
        if not self._media:
            check_positions(input_ids_BT, padding, model_kwargs)
        trusted = capability(target)
        check_batch(target, padding)
        batch = input_ids_BT.shape[0]
        among = among or batch
        stop = StopCheck(stopping_criteria, among)
        self.in_whole_steps, self.ends = trusted != "chain", stop.ends
        self.recorder = _recorder(config, batch, acceptance)
        rows = [
            Row(i, among, prompt_T, stop, streamer, self.recorder)
            for i, prompt_T in enumerate(input_ids_BT)
        ]
        self._sampled = bool(config.do_sample)
        self.rule = make_rule(
            acceptance, logits_processor, self._sampled, **(acceptance_settings or {})
        )
        if streamer is not None and batch > 1:
            raise ValueError("a streamer takes one sequence: pass a batch of 1, or no streamer")
        self.slots = int(config.max_length or 0) + drafter.num_nodes
        if trusted == "recurrent":  # which reads tokens again behind the longest row
            self.slots += drafter.num_nodes + drafter.most_again(among)
        cache, self.given = own_cache(target, model_kwargs, input_ids_BT, self.slots)
        self.state = decoding_state(
            rows, cache, padding, config.max_length, keeps_fresh=drafter.reads_prompt
        )
        if (rule := position_rule(model)) is not None:
            rule = rule.of_texts(config.max_length, input_ids_BT.shape[1], padding, among)
        if rule is not None:
            beside = "beside a recurrent state" if trusted == "recurrent" else None
            if self._media:
                beside = "in prompts with images, which are not read again"
            if beside is not None:
                raise rule.refusal(beside, "use the target's own generate()")
            self.state.position_rule, self.in_whole_steps = rule, False
        self._target, self._drafter, self._rng, self._random = target, drafter, rng, random
        self._input_ids_BT, self._model_kwargs = input_ids_BT, model_kwargs
        # On a GPU transformers would compile the forward that reads a prompt in parts, as the cache
        # has a fixed capacity: it can be a part of a graph only where a tree is verified.
        self._config = copy.copy(config)
        self._config.disable_compile = True
        self._processors = logits_processor

    def read_prompts(self, last_hidden: Callable[[], Tensor], stats: GenerationStats) -> None:
        """The target reads the prompts, and each row's first token is committed; `last_hidden`
        gives what the lm_head last read. Raises ValueError: a given cache and the prompts do not
        belong together."""
        state, rule, ids_BT = self.state, self.rule, self._input_ids_BT
        with stats.phase("prefill"):
            state.warpers = self._processors if self._sampled else None
            if self._sampled and self._rng == "keyed" and isinstance(rule, SampleThenMatch):
                # Drawn once a call, so that the next call draws anew.
                seed = int(torch.randint(1 << 62, (), generator=self._random, device="cpu"))
                state.noise = rule.noise = Noise(seed, state.rows, state.padding)
            reading: AbstractContextManager[list[Tensor]] = nullcontext([])
            if self._drafter.reads_prompt:
                reading = self._target.capture_prompt()
                self._model_kwargs.pop("logits_to_keep", None)
            with reading as prompt_hidden:
                logits_BV, hidden_B1D = self._read(ids_BT, last_hidden)
            self.in_whole_steps &= not any(state.ahead)
        with stats.phase("walk"):
            # The prompt's last token is a tree of one node, verified by the prefill.
            prompt = TokenTree.root_only(ids_BT[:, -1])
            self._drafter.observe(prompt, logits_BV[:, None])
            finish_step(state, rule(prompt, logits_BV[:, None], state.rows), hidden_B1D, stats)
            if prompt_hidden:
                state.take_prompt(torch.cat(prompt_hidden, dim=1))

    def read_again(self, last_hidden: Callable[[], Tensor], stats: GenerationStats) -> None:
        """The target reads the whole text of the one row anew, which commits a token."""
        state = self.state
        (row,), (padding,) = state.rows, state.padding
        with stats.phase("target"):
            self._drafter.rest(state)
            mask_1T = torch.ones_like(row.ids_1T())
            mask_1T[:, :padding] = 0
            positions_1T = (mask_1T.cumsum(dim=1) - 1).clamp_min(0)
            self._model_kwargs |= {"attention_mask": mask_1T, "position_ids": positions_1T}
            self._model_kwargs[self._target.cache_argument] = state.cache
            state.cache.set_length(0)
            logits_BV, hidden_B1D = self._read(row.ids_1T(), last_hidden)
        with stats.phase("walk"):
            state.lengths = [row.length]
            tree = TokenTree.root_only(state.roots_B)
            finish_step(state, self.rule(tree, logits_BV[:, None], [row]), hidden_B1D, stats)

    def _read(self, ids_BT: Tensor, last_hidden: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Logits and hidden states at the end of texts, of which the cache has a beginning."""
        cache, model = self.state.cache, self._target.model
        # A cache that was returned earlier holds states to go on from.
        positions = positions_given(model, media=self._media)
        with scans_go_on(model, cache.layers), positions as given:
            # transformers' own: chunked, or from a cache.
            transformers_model: Any = model
            prefilled = transformers_model._prefill(ids_BT, self._config, self._model_kwargs)
            logits_BV = prefilled.logits[:, -1]
        last_B = [ids_BT.shape[1] - 1 - before for before in self.state.padding]
        self.state.ahead = positions_ahead(given, last_B)
        # Read at once: a logits processor may run the model itself.
        hidden_B1D = last_hidden()[:, -1:]
        made = prefilled.get(self._target.cache_argument)
        if cache.row_layers and made is not None and made is not cache:
            # The model reads a text anew where its positions are turned in another way.
            cache.set_length(0)
            cache.take_over(made)
        if cache.row_layers and cache.get_seq_length() != ids_BT.shape[1]:
            raise ValueError(
                f"the given cache and the {ids_BT.shape[1]} given tokens make "
                f"{cache.get_seq_length()} tokens: pass the whole text, not only what is new"
            )
        return logits_BV, hidden_B1D


def finish_step(
    state: DecodingState, paths: list[list[int]], hidden_BND: Tensor, stats: GenerationStats
) -> None:
    """The paths of a step are committed: tell the rows, count, and take their ends."""
    for row, path in zip(state.rows, paths, strict=True):
        if path:
            row.end_step()
    stats.steps += sum(1 for path in paths if path)
    stats.accepted.update(len(path) - 1 for path in paths if path)
    stats.tokens += sum(map(len, paths))
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
    return ScoreRecorder(bool(config.output_scores))
