"""Command lines made of dataclasses, a YAML file underneath, and errors in one sentence.

Every command builds on these two functions:

    parse_arguments((TargetArguments, DataArguments), argv, prog="train-heads", description=...)
    run_command(lambda: work(arguments))
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO, get_args, get_origin, get_type_hints

from medusa_heads.cli.flags.parser import make_parser
from medusa_heads.cli.flags.unknown_names import explain_flag, explain_key
from medusa_heads.cli.settled import forget_choices
from medusa_heads.errors import MedusaWarning
from medusa_heads.files import parse_yaml
from medusa_heads.masking import masked

TRACEBACK_VARIABLE = "MEDUSA_HEADS_TRACEBACK"
# In the system's words, which safetensors repeats, and in those of torch.save.
_LONGEST = 1200  # characters of a sentence
_FULL_DISK = (os.strerror(errno.ENOSPC), "PytorchStreamWriter", "unexpected pos")


def run_command(main: Callable[[], object], *, prog: str = "medusa-heads") -> int:
    """Run a command and return its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C, 143 for
    SIGTERM, which ends it as Ctrl-C does.

    A ValueError, an OSError, or what a library says of a full disk or memory becomes one sentence
    on stderr; with `MEDUSA_HEADS_TRACEBACK=1` it is raised as it is. Anything else is a fault of
    the program and keeps its traceback. This package's own warnings are sentences, too.
    """
    try:
        with _own_warnings_as_sentences(prog), _ended_by_sigterm():
            main()
    except _Terminated:
        print(f"{prog}: ended by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        full = any(words in str(error) for words in _FULL_DISK)
        # Of torch by its name: most commands end without importing it.
        crowded = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        expected = full or crowded or isinstance(error, ValueError | OSError)
        if not expected or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        # Messages of the libraries underneath may run over several lines, or quote all of a value.
        sentence = _shortened(" ".join(str(error).split())) or type(error).__name__
        if full:
            sentence = f"a file could not be written, is the disk full? ({sentence})"
        if crowded:
            sentence = f"the memory is full: take smaller batches or shorter texts ({sentence})"
        print(f"{prog}: error: {sentence}", file=sys.stderr)
        return 2
    finally:
        forget_choices()
    return 0


def _shortened(sentence: str) -> str:
    if len(sentence) <= _LONGEST:
        return sentence
    return f"{sentence[: _LONGEST // 2]} [..] {sentence[-_LONGEST // 2 :]}"


class _Terminated(SystemExit):
    """SIGTERM came. Whoever cleans up behind an exception does so."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises, unless the program that called handles it; a second one
    ends the process at once."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process, came = os.getpid(), False

    def terminate(number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:  # a worker that was forked later ends as any other would
            signal.raise_signal(number)
        raise _Terminated(128 + number)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except Exception as error:
        if came:  # compiled code makes an error of its own of what is raised in the middle of it
            raise _Terminated(128 + signal.SIGTERM) from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _own_warnings_as_sentences(prog: str) -> Iterator[None]:
    show = warnings.showwarning

    def show_sentence(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, MedusaWarning):
            print(f"{prog}: warning: {message}", file=sys.stderr)
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_sentence
    try:
        yield
    finally:
        warnings.showwarning = show


def parse_arguments(
    types: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    positional: str | Sequence[str] | None = None,
) -> tuple[Any, ...]:
    """Read one instance of each dataclass from flags and, underneath them, `--config FILE.yaml`.

    Flags are transformers' (`--num_heads` or `--num-heads`); a flag beats the file, the file beats
    the default. The fields named by `positional` may also be given first, without their flags.

    Raises:
        ValueError: an unknown flag or key (the nearest known one is named), or a value that does
            not fit its type.
        OSError: the file cannot be read.
    """
    for kind in types:
        assert is_dataclass(kind)
    first = [positional] if isinstance(positional, str) else list(positional or ())
    parser = make_parser(types, prog, description, first)
    given = list(sys.argv[1:] if argv is None else argv)
    for place, name in enumerate(first):
        if len(given) <= 2 * place or given[2 * place].startswith("-"):
            break
        given.insert(2 * place, f"--{name}")
    before = ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config", nargs="?")
    path = before.parse_known_args(given)[0].config
    if path is not None and not {"-h", "--help"} & set(given):
        values = read_config(path, types)
        parser.set_defaults(**values)
    # argparse would ask for a required flag even where the file has it, and before it names a
    # misspelt one.
    required = [action for action in parser._actions if action.required]
    for action in parser._actions:
        action.required = False
    namespace, surplus = parser.parse_known_args(given)
    if surplus:
        if not surplus[0].startswith("-"):
            raise ValueError(
                f"unknown argument {surplus[0]!r}; text of several words needs quotes, and all "
                "else the name of a flag before it"
            )
        flags = [flag for action in parser._actions for flag in action.option_strings]
        known = sorted({flag[2:].replace("-", "_") for flag in flags if flag != "-h"})
        raise ValueError(explain_flag(surplus[0], _behind(surplus[0], given), known))
    for action in required:
        if getattr(namespace, action.dest) in (None, []):
            what = (action.help or "").rstrip(".")
            raise ValueError(
                f"--{action.dest} is missing: give it as a flag or in the --config file ({what})"
            )
    *parsed, _ = parser.parse_args_into_dataclasses(given, look_for_args_file=False)
    if argv is None:
        sys.argv[1:] = masked(sys.argv[1:])  # which trackers of training runs keep whole
    return tuple(parsed)


def read_config(path: str | os.PathLike[str], types: Sequence[type]) -> dict[str, Any]:
    """The values of a YAML file, each checked against the dataclass field of its name.

    Raises:
        ValueError: not a YAML mapping, an unknown key, or a value of another type.
        OSError: the file cannot be read.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"expected a YAML file at {str(path)!r}, found none")
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML ({error})") from error
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path} must hold 'key: value' lines, got a YAML {type(content).__name__}"
        )
    known = {name: hint for kind in types for name, hint in _field_types(kind).items()}
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            hint = explain_key(name, value, list(known))
            raise ValueError(f"{path}: unknown key {str(key)!r}{hint}")
        if name in values:
            raise ValueError(f"{path}: the key {str(key)!r} is given twice")
        values[name] = coerce(value, known[name], f"{path}: {key}")
    return values


def coerce(value: Any, hint: Any, label: str) -> Any:
    """`value` as the type `hint`: YAML reads `1e-4` as a string and `5` as an integer.

    Raises:
        ValueError: it does not fit; the message begins with `label`.
    """
    options = get_args(hint)
    if get_origin(hint) is Literal:
        if value in options:
            return value
        raise ValueError(f"{label} must be one of {list(options)}, got {value!r}")
    if type(None) in options:
        if value is None:
            return None
        if dict in options and isinstance(value, Mapping):
            try:
                return json.dumps(value)
            except TypeError as error:  # a date, a set
                raise ValueError(f"{label} must hold plain values ({error})") from error
        plain = [option for option in options if option is not type(None) and option is not dict]
        return coerce(value, plain[0], label)
    if get_origin(hint) is list:
        if isinstance(value, options[0]):
            value = [value]  # one item needs no brackets, as it needs none on the command line
        if not isinstance(value, list):
            raise ValueError(f"{label} must be a list, got {value!r}")
        return [coerce(item, options[0], label) for item in value]
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{label} must be of type {hint.__name__}, got {value!r}")


def _field_types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _behind(flag: str, given: Sequence[str]) -> str | None:
    """What stands on the command line behind a flag."""
    place = given.index(flag) + 1
    return given[place] if place < len(given) else None
