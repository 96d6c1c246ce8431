"""One text that was asked for: what it is to be like, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from medusa_heads.data.pieces import Pieces
from medusa_heads.inference.endpoint.conversation import Calls
from medusa_heads.inference.endpoint.logprobs import Weighed, Weights, names_behind

Ending = Literal["stop", "length", "cancelled", "failed"]


@dataclass(eq=False)
class Text:
    """A text, asked for by one thread and written by another."""

    prompt: list[int]  # its token ids
    max_tokens: int  # that are written at most
    options: dict[str, Any] = field(default_factory=dict)  # further ones of `generate()`
    seed: int | None = None  # of what is drawn
    stop: Sequence[str] = ()  # strings before which the text ends
    stop_ids: Collection[int] = ()  # tokens before which it ends, of which no text is made
    # How many likeliest tokens are told of each token; None: no log-probabilities.
    logprobs: int | None = None
    echo: bool = False  # whether the prompt is told before it
    # Finds calls of tools in it, which is told at its end then; None: there are none.
    calls: Calls | None = None
    # Tokens that end it by themselves. No text is made of them either: a tokenizer may take such a
    # one for a word.
    ends: Collection[int] = ()
    # Called by the thread that writes, with each piece of the text, and at the end with "" and how
    # it ended.
    tell: Callable[[str, Ending | None], None] = lambda piece, ending: None
    begun: int = 0  # tokens of the prompt that an earlier text had read
    tokens: int = 0  # written so far, up to where it stopped
    ending: Ending | None = None  # None while it is being written
    fault: BaseException | None = None  # why it failed
    asked_at: float = field(default_factory=time.perf_counter)
    stopped: bool = False  # whether it has come to a string to stop at
    # Log-probabilities of the tokens written so far, where they were asked for.
    weighed: list[Weighed] = field(default_factory=list)
    message: dict[str, Any] | None = None  # the answer that calls tools, if it does
    _written: list[int] = field(default_factory=list)  # the tokens
    _held: str = ""  # may be the beginning of a string to stop at
    _length: int = 0  # of the text so far, with what is held

    def begin(
        self, decode: Callable[[list[int]], str], spell: Callable[[list[int]], str] | None = None
    ) -> None:
        """The prompt is about to be read; `decode` is the tokenizer's, and `spell` the same of
        which special tokens have a text too."""
        self._decode, self._spell = decode, spell or decode
        self._pieces = Pieces(decode, self.prompt)
        self._by_token = bool(self.stop) or self.logprobs is not None
        self._before = self.prompt[-1:]

    def weigh(self, logits_V: Tensor, token: int) -> None:
        """The next token is about to be put, which was chosen by these logits."""
        if not self.stopped:
            (self._weights,) = Weights.of(logits_V[None], [token], self.logprobs or 0)

    def tell_prompt(self, logits_TV: Tensor | None) -> None:
        """As a part of the text; with the target's logits behind each of its tokens, where those
        are to be weighed."""
        pieces, said, ids = Pieces(self._decode), "", self.prompt
        self._pieces = pieces  # the last character of a prompt may become whole in the text
        if logits_TV is None:
            pieces.put(ids)
            said = pieces.next()
        else:
            weights = Weights.of(logits_TV[:-1], ids[1:], self.logprobs or 0)
            for place, token in enumerate(ids):
                pieces.put([token])
                piece = pieces.next()
                if place == 0:
                    self.weighed.append(Weighed(self._spell(ids[:1]), None, [], 0))
                else:
                    name = names_behind(self._spell, ids[place - 1 : place])
                    self.weighed.append(weights[place - 1].named(name, token, len(said), piece))
                said += piece
        self._length = len(said)
        self._say(said)

    def put(self, token: Tensor) -> None:
        """The next token, as streamers are given it."""
        if self.stopped:  # others of the same step
            return
        self.tokens += 1
        if self.calls is not None:
            self._written.append(int(token))
        if token.item() in self.stop_ids or token.item() in self.ends:
            self._name(int(token), "")
            self.flush()
            self.stopped = True
            return
        self._pieces.put(token.tolist())
        if self._by_token:
            piece = self._pieces.next()
            self._name(int(token), piece)
            self._send(piece)

    def end_step(self) -> None:
        """All tokens of a step are there."""
        if not self._by_token and not self.stopped:
            self._send(self._pieces.next())

    def flush(self) -> None:
        """No token follows: what was held back is told."""
        if self.stopped:
            return
        self._send(self._pieces.next(whole=True))
        if not self.stopped:
            held, self._held = self._held, ""
            self._say(held)
            if self.calls is not None:
                self.message = self.calls.of(self._spell(self.prompt), self._spell(self._written))

    def end(self, ending: Ending, fault: BaseException | None = None) -> None:
        """Nothing more is written; one that was written to its end has been flushed."""
        self.ending, self.fault = ("stop" if self.stopped else ending), fault
        self.tell("", self.ending)

    def _name(self, token: int, piece: str) -> None:
        """The token that has made this piece of the text, where it is weighed."""
        if self.logprobs is not None:
            name = names_behind(self._spell, self._before)
            self.weighed.append(self._weights.named(name, token, self._length, piece))
            self._before = [token]

    def _send(self, piece: str) -> None:
        self._held += piece
        self._length += len(piece)
        found = [place for each in self.stop if (place := self._held.find(each)) >= 0]
        if found:
            self.stopped = True
            self._say(self._held[: min(found)])
            return
        ready = len(self._held) - max((_begun(self._held, each) for each in self.stop), default=0)
        self._say(self._held[:ready])
        self._held = self._held[ready:]

    def _say(self, piece: str) -> None:
        if piece:
            self.tell(piece, None)


def _begun(text: str, string: str) -> int:
    """How many characters of the string the text ends with, as far as it is not whole."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)
