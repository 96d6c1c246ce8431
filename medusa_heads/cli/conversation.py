"""A conversation with a target that drafts, whose cache is kept from turn to turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from medusa_heads.cache_names import cache_of
from medusa_heads.data.chat import ask_ids
from medusa_heads.data.encoding import prompt_ids
from medusa_heads.data.pieces import as_written
from medusa_heads.data.prompts import stop_ids
from medusa_heads.files import expanded, replace_file
from medusa_heads.target.cache import RowCache

if TYPE_CHECKING:
    from medusa_heads.cli.streaming import StepStreamer
    from medusa_heads.inference.models.assisted import AssistedModel


class Conversation:
    """What was said so far, and what of it the target's cache holds: of the `prompt_tokens` in the
    last turn's prompt `cached_tokens`. The model may be replaced by another on the same target.
    A chat template is told `arguments` besides. Without one, what is said is one running text that
    the target continues."""

    def __init__(
        self,
        model: AssistedModel,
        tokenizer: Any,
        system: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self._arguments = model, arguments
        self._tokenizer = tokenizer
        self._system = system
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self._text_ids: list[int] = []  # the running text, where there is no template
        self._cache: RowCache | None = None
        self._cached_ids: list[int] = []

    @property
    def has_template(self) -> bool:
        """Whether turns are marked as the target was trained to see them."""
        return bool(self._tokenizer.chat_template)

    def ask(self, text: str, streamer: StepStreamer, options: Mapping[str, Any]) -> bool:
        """Say something and stream the answer; whether the answer came to its end. Ctrl-C ends the
        answer: what was said until then stays in the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._render(messages, text)
        options = {**options, "max_new_tokens": self._room(len(ids), options["max_new_tokens"])}
        if (cache := self._take_cache(ids)) is not None:
            options[self.model.target.cache_argument] = cache
        input_ids_1T = torch.tensor([ids], device=self.model.target.device)
        # The token that ends it is no part of an answer, though a tokenizer may call it a word.
        streamer.ends = stop_ids(self.model.target.model)
        finished = True
        try:
            output: Any = self.model.generate(
                input_ids_1T,
                attention_mask=torch.ones_like(input_ids_1T),
                streamer=streamer,
                return_dict_in_generate=True,
                **options,
            )
            # States alone do not say how much they have read, and are taken on by nobody.
            if isinstance(cache := cache_of(output), RowCache) and cache.row_layers:
                self._cache = cache
                self._cached_ids = output.sequences[0, : cache.get_seq_length()].tolist()
        except KeyboardInterrupt:
            finished = False
        answer = streamer.tokens
        if not answer:
            return finished  # stopped before a word: as if nothing had been said
        self.prompt_tokens = len(ids)
        ended = answer[-1] in streamer.ends
        said = answer[: len(answer) - ended]
        self._text_ids = ids + said
        content = as_written(self._tokenizer, skip_special_tokens=True)(said)
        self.messages = [*messages, {"role": "assistant", "content": content}]
        return finished

    def save(self, file: str) -> None:
        """Write the messages as JSON, beside the place first. Raises ValueError: it cannot be."""
        content = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False)
        try:
            replace_file(expanded(file), content + "\n")
        except OSError as error:  # by itself it names the place beside
            reason = error.strerror or error
            raise ValueError(f"{file!r} cannot be written ({reason})") from error

    def _render(self, messages: list[dict[str, str]], text: str) -> list[int]:
        """Token ids of the whole conversation, ready to be answered."""
        if not self.has_template:
            if not self._text_ids:
                text = "\n".join([*([self._system] if self._system else []), text])
                return prompt_ids(self._tokenizer, text)
            if not self._tokenizer.decode(self._text_ids[-1:]).endswith("\n"):
                text = "\n" + text
            return [*self._text_ids, *self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        return ask_ids(self._tokenizer, messages, self._arguments)

    def _room(self, prompt_tokens: int, max_new_tokens: int) -> int:
        limit = self.model.target.max_positions
        if limit is None:
            return max_new_tokens
        if prompt_tokens >= limit:
            raise ValueError(
                f"the conversation has {prompt_tokens} tokens and the target's context only "
                f"{limit}: /reset starts a new one"
            )
        return min(max_new_tokens, limit - prompt_tokens)

    def _take_cache(self, ids: list[int]) -> RowCache | None:
        """The cache, cut to what the new text begins with: a template may render earlier turns
        differently (drop a thought, trim a space), and rows of other text would be wrong."""
        cache, cached_ids = self._cache, self._cached_ids
        self._cache, self._cached_ids, self.cached_tokens = None, [], 0
        if cache is None:
            return None
        pairs = zip(ids[:-1], cached_ids, strict=False)  # the last token is always run
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if not common or not (cache.can_go_back or common == len(cached_ids)):
            return None
        cache.set_length(common)
        self.cached_tokens = common
        return cache
