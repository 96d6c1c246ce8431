"""Text on the screen as it is generated, a step at a time."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from medusa_heads.data.pieces import Pieces, as_written

COLOURS = ("cyan", "yellow")


class StepStreamer:
    """A streamer for generate(): writes the tokens of a step once all of them are known. `tokens`
    are those generated so far, also of a call that was interrupted. With `group` it shows which
    text came in one step: in alternating colours on a terminal, else in brackets. No text is made
    of tokens that are `ends`, which a tokenizer may take for words. Further options are of the
    tokenizer's decode()."""

    ends: Collection[int] = ()

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_prompt: bool = False,
        group: bool = False,
        **decode_options: Any,
    ) -> None:
        self.tokens: list[int] = []
        self._decode = as_written(tokenizer, **decode_options)
        self._skip_prompt = skip_prompt
        self._group = group
        self._console: Any = None
        self._prompt_seen = False
        self._written = 0  # pieces
        self._text = Pieces(self._decode)
        if group:
            from rich.console import Console

            console = Console(highlight=False)
            if console.is_terminal and console.color_system and not console.no_color:
                self._console = console

    def put(self, value: Any) -> None:
        """The prompt's ids first, then each new token."""
        ids = value.flatten().tolist()
        if not self._prompt_seen and self._skip_prompt:
            self._text = Pieces(self._decode, ids)
        else:
            shown = [id for id in ids if id not in self.ends] if self._prompt_seen else ids
            self._text.put(shown)
        if self._prompt_seen:
            self.tokens += ids
        elif not self._skip_prompt:
            self._write(self._text.next(whole=True), styled=False)
        self._prompt_seen = True

    def end_step(self) -> None:
        """Show the step's text; a character that is not complete waits for the next step."""
        self._write(self._text.next(), styled=True)

    def end(self) -> None:
        """Show what still waited, and end the line."""
        self._write(self._text.next(whole=True), styled=True)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _write(self, text: str, *, styled: bool) -> None:
        if not text:
            return
        if self._console is not None and styled:
            self._console.out(text, style=COLOURS[self._written % 2], end="", highlight=False)
        else:
            sys.stdout.write(f"[{text}]" if self._group and styled else text)
        sys.stdout.flush()
        self._written += styled
