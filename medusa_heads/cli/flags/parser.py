"""The parser of a command: transformers' HfArgumentParser, with a help that fits a screen."""

from __future__ import annotations

import importlib.util
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


def make_parser(
    types: Sequence[type], prog: str, description: str, positional: Sequence[str]
) -> Any:
    """A parser of these dataclasses' fields and of --config; misuse raises ValueError.

    Args:
        types: dataclasses whose fields become flags.
        prog: the command.
        description: what it does.
        positional: fields that may be given first, without their flags.
    """

    class Parser(_hf_argument_parser()):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            # argparse would print the usage, a screen long, before the one line that matters.
            raise ValueError(f"{message} (see {self.prog} --help)")

    parser = Parser(
        types,
        prog=prog,
        description=description,
        epilog="Dashes may stand for underscores: --some-flag is --some_flag.",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    usage = [prog]
    for action in parser._actions:
        if action.option_strings[0].startswith("--no_"):
            action.help = f"Switch --{action.dest} off."
        name = action.dest.upper()
        if action.dest in positional:
            usage.append(name if action.required else f"[{name}]")
        elif action.required:
            usage.append(f"--{action.dest} {name}")
    parser.usage = " ".join([*usage, "[flags]"])
    parser.add_argument("--config", metavar="FILE.yaml", help="Values for any of these flags.")
    return parser


class _HelpFormatter(ArgumentDefaultsHelpFormatter):
    """One spelling of each flag, and its default where that says something."""

    def _get_help_string(self, action: Action) -> str | None:
        if action.default in (None, [], SUPPRESS) or action.option_strings[0].startswith("--no_"):
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: Action) -> str:
        flags = action.option_strings
        shown = copy(action)
        shown.option_strings = [flag for flag in flags if "-" not in flag[2:]]
        return super()._format_action_invocation(shown)


def _hf_argument_parser() -> type[ArgumentParser]:
    """transformers' HfArgumentParser, without the seconds that `import transformers` can take.

    The module that defines it needs only the standard library and PyYAML; should that change, the
    ordinary import serves.
    """
    package = importlib.util.find_spec("transformers")
    if package is not None and package.origin is not None:
        file = Path(package.origin).with_name("hf_argparser.py")
        spec = importlib.util.spec_from_file_location("_transformers_hf_argparser", file)
        if spec is not None and spec.loader is not None:
            module: ModuleType = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
                found: type[ArgumentParser] = module.HfArgumentParser
                return found
            except (ImportError, OSError, AttributeError):
                pass
    from transformers.hf_argparser import HfArgumentParser

    return HfArgumentParser
