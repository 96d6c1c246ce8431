"""What a file says of the machine it was written on, and of secrets typed there: taken out before
it is published."""

from __future__ import annotations

import re
from pathlib import PurePath, PureWindowsPath
from typing import Any

from medusa_heads.masking import masked_text

# An absolute path, or one from the home directory or above the working one, within other text.
_PATH = re.compile(
    r"""(?:file://|(?<![\w:/.~\\-]))  # no part of a word, a URL or a relative path
        (?:~[\w.-]*|\.\.|[A-Za-z]:(?=[/\\])|(?=/))
        (?:[/\\][^\s"'`=,;:|<>()\[\]{}/\\]+)+ [/\\]?""",
    re.VERBOSE,
)
_PATH_ALONE = re.compile(r"(?:~?/|\.\./|[A-Za-z]:\\)[^\n]*$")


def without_paths(value: Any, renamed: tuple[str, str] | None = None) -> Any:
    """`value`, plain JSON, with every path of this machine cut down to its last part
    and every secret starred out.

    Args:
        value: is not changed.
        renamed: a name and what stands for it, wherever it is met.
    """
    if isinstance(value, dict):
        return {_of_text(key, renamed): without_paths(item, renamed) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item, renamed) for item in value]
    return _of_text(value, renamed) if isinstance(value, str) else value


def _of_text(text: str, renamed: tuple[str, str] | None) -> str:
    if renamed is not None and renamed[0]:
        text = re.sub(
            rf"(?<![\w./~-]){re.escape(renamed[0])}(?![\w/-])", lambda _: renamed[1], text
        )
    # A path alone, or behind `--flag=`, may hold spaces.
    before, equals, last = text.rpartition("=")
    if _PATH_ALONE.match(last):
        text = f"{before}{equals}{_last_part(last)}"
    text = masked_text(text)
    return _PATH.sub(lambda match: _last_part(match.group()), text)


def _last_part(path: str) -> str:
    kind = PureWindowsPath if "\\" in path else PurePath
    return kind(path).name
