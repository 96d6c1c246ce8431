"""Text on the screen as it is generated, a step at a time."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

COLOURS = ("cyan", "yellow")
UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character


class StepStreamer:
    """A streamer for generate(): writes the tokens of a step once all of them are known. `tokens`
    are those generated so far, also of a call that was interrupted. With `group` it shows which
    text came in one step: in alternating colours on a terminal, else in brackets. Further options
    are of the tokenizer's decode()."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_prompt: bool = False,
        group: bool = False,
        **decode_options: Any,
    ) -> None:
        self.tokens: list[int] = []
        self._decode = partial(tokenizer.decode, **decode_options)
        self._skip_prompt = skip_prompt
        self._group = group
        self._console: Any = None
        self._prompt_seen = False
        self._pieces = 0
        # The text of _ids[_from:_shown] is on the screen. What follows is decoded together with it:
        # by itself, some tokenizers would drop its leading space.
        self._ids: list[int] = []
        self._from = 0
        self._shown = 0
        if group:
            from rich.console import Console

            console = Console(highlight=False)
            if console.is_terminal and console.color_system and not console.no_color:
                self._console = console

    def put(self, value: Any) -> None:
        """The prompt's ids first, then each new token."""
        ids = value.flatten().tolist()
        self._ids += ids
        if self._prompt_seen:
            self.tokens += ids
        elif self._skip_prompt:
            # A few of its last tokens stay, for the first new ones to be decoded with.
            self._from, self._shown = max(0, len(self._ids) - 4), len(self._ids)
        else:
            self._write(self._new_text(whole=True), styled=False)
        self._prompt_seen = True

    def end_step(self) -> None:
        """Show the step's text; a character that is not complete waits for the next step."""
        self._write(self._new_text(), styled=True)

    def end(self) -> None:
        """Show what still waited, and end the line."""
        self._write(self._new_text(whole=True), styled=True)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _new_text(self, *, whole: bool = False) -> str:
        before = self._decode(self._ids[self._from : self._shown])
        now = self._decode(self._ids[self._from :])
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not whole):
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def _write(self, text: str, *, styled: bool) -> None:
        if not text:
            return
        if self._console is not None and styled:
            self._console.out(text, style=COLOURS[self._pieces % 2], end="", highlight=False)
        else:
            sys.stdout.write(f"[{text}]" if self._group and styled else text)
        sys.stdout.flush()
        self._pieces += styled
