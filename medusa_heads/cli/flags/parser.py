"""The parser of a command: transformers' HfArgumentParser, with a help that fits a screen."""

from __future__ import annotations

import importlib.util
from argparse import (
    SUPPRESS,
    Action,
    ArgumentDefaultsHelpFormatter,
    ArgumentError,
    ArgumentParser,
    Namespace,
)
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import Field, field, fields, make_dataclass
from functools import reduce
from importlib import metadata
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from medusa_heads.settings import flag_name

# What a line of a help begins with that stays as it is written: commands of a shell, and of `chat`.
_COMMANDS = ("medusa-heads ", "train-heads ", "train-draft ", "accelerate launch ", "/")


def flags_of(kinds: Sequence[type]) -> list[tuple[str, Any, Field[Any]]]:
    """The flags that give dataclasses their fields: name, type as it is typed, and a field."""
    flags = []
    for kind in kinds:
        hints = get_type_hints(kind)
        for part in fields(kind):
            if (name := flag_name(part)) is not None:
                metadata = {key: told for key, told in part.metadata.items() if key != "flag"}
                typed = _as_typed(hints[part.name])
                if any(get_origin(option) is list for option in (typed, *get_args(typed))):
                    again = metadata.get("action") == "extend"
                    metadata["action"] = _Joined if again else _Once
                made: Field[Any] = field(
                    default=part.default, default_factory=part.default_factory, metadata=metadata
                )
                flags.append((name, typed, made))
    return flags


def _as_typed(hint: Any) -> Any:
    """A mapping is typed as JSON or in a short form, a sequence as its items."""
    origin = get_origin(hint)
    if origin is UnionType:
        return reduce(or_, map(_as_typed, get_args(hint)))
    if origin is Mapping:
        return dict | str | None
    return list[get_args(hint)[0]] if origin is Sequence else hint  # type: ignore[misc]


def make_parser(
    types: Sequence[type], prog: str, description: str, positional: Sequence[str]
) -> Any:
    """A parser of these dataclasses' flags and of --config; misuse raises ValueError. The flags in
    `positional` may be given first, without their names."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{message} (see {prog} --help)")

    parser: Any = _hf_argument_parser()(
        [make_dataclass("Flags", flags_of(types), kw_only=True)],
        prog=prog,
        description=description,
        epilog="Dashes may stand for underscores: --some-flag is --some_flag.",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    # argparse would print the usage, a screen long, before the one line that matters.
    parser.error = refuse
    usage = [prog]
    for action in parser._actions:
        if _switches_off(action):
            action.help = f"Switch --{action.dest} off."
        name = action.dest.upper()
        if action.dest in positional:
            usage.append(name if action.required else f"[{name}]")
        elif action.required:
            usage.append(f"--{action.dest} {name}")
    parser.usage = " ".join([*usage, "[flags]"])
    parser.add_argument("--config", metavar="FILE.yaml", help="Values for any of these flags.")
    parser.add_argument("--version", action=_Version, nargs=0, help="Print the version and end.")
    return parser


class _Once(Action):
    """Takes all values of a flag at once. argparse would drop those that it was given before, and
    some tools join them: whichever is meant, it is written otherwise."""

    def __call__(self, _: object, namespace: Namespace, values: Any, *__: object) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise ArgumentError(self, "given twice: write all its values behind one")
        setattr(namespace, self.dest, values)


class _Joined(Action):
    """Joins the values of a flag that may be given several times. Together they replace whatever
    was the default, to which argparse would add them."""

    def __call__(self, _: object, namespace: Namespace, values: Any, *__: object) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if before is self.default else before), *values])


class _Version(Action):
    """argparse's own wants to know the version before anybody asks."""

    def __call__(self, parser: ArgumentParser, *_: object) -> NoReturn:
        print(f"medusa-heads {metadata.version('medusa-heads')}")
        parser.exit()


def _switches_off(action: Action) -> bool:
    """Whether it is the opposite of a switch, which HfArgumentParser makes of one that is on."""
    return action.option_strings[0] == f"--no_{action.dest}"


class _HelpFormatter(ArgumentDefaultsHelpFormatter):
    """One spelling of each flag, and its default where that says something; commands stand on lines
    of their own, to be pasted."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.strip().split("\n\n"):
            lines = [line.strip() for line in paragraph.splitlines()]
            if all(line.startswith(_COMMANDS) for line in lines):
                paragraphs.append("\n".join(f"{indent}  {line}" for line in lines))
            else:
                paragraphs.append(super()._fill_text(paragraph, width, indent))
        return "\n\n".join(paragraphs)

    def _get_help_string(self, action: Action) -> str | None:
        if action.default in (None, [], SUPPRESS) or _switches_off(action):
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: Action) -> str:
        shown = copy(action)
        shown.option_strings = [flag for flag in action.option_strings if "-" not in flag[2:]]
        return super()._format_action_invocation(shown)


def _hf_argument_parser() -> Any:
    """transformers' HfArgumentParser, without the seconds that `import transformers` can take: its
    file needs the standard library alone. Should that change, the ordinary import serves."""
    spec = importlib.util.spec_from_file_location(
        "_transformers_hf_argparser", transformers_file("hf_argparser.py")
    )
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError):
        import transformers as module
    return module.HfArgumentParser


def transformers_file(name: str) -> Path:
    """Where a module of transformers lies; nothing is imported."""
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    return Path(package.origin).with_name(name)
