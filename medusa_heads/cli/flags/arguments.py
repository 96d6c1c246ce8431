"""Command lines made of dataclasses, a YAML file underneath, and errors in one sentence.

parse_arguments((TargetArguments, DataArguments), argv, prog="train-heads", description=...)
run_command(lambda: work(arguments))
main = command("medusa-heads env", show, __doc__, "target")  # both of them
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType, MappingProxyType
from typing import Any, get_type_hints

from medusa_heads.cli.choices import forget_choices
from medusa_heads.cli.flags.config_file import read_config
from medusa_heads.cli.flags.environment import told_to_torch
from medusa_heads.cli.flags.parser import make_parser
from medusa_heads.cli.flags.streams import usable_streams
from medusa_heads.cli.flags.unknown_names import explain_flag
from medusa_heads.errors import MedusaWarning, is_disk_full
from medusa_heads.masking import masked, without_passwords
from medusa_heads.settings import flag_name

TRACEBACK_VARIABLE = "MEDUSA_HEADS_TRACEBACK"
Presets = Mapping[str, Mapping[str, Mapping[str, Any]]]
# The logger, and what it says whenever peft is imported where a package is not that nobody needs.
_NOISE = ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward")
_SIGPIPE = 13  # which some systems do not have
_LONGEST = 1200  # characters of a sentence
_AGAIN = 0.2  # seconds, in which a hook of the interpreter's is surely over


def run_command(main: Callable[[], object], *, prog: str = "medusa-heads") -> int:
    """Run a command and return its exit code: 0, or the number that it returns; 2 for a user's
    mistake, 130 for Ctrl-C, 143 for SIGTERM, which ends it as Ctrl-C does, 141 where nobody reads
    on what it prints. A ValueError, an OSError, or what a library says of a full disk or memory
    becomes one sentence on stderr; with `MEDUSA_HEADS_TRACEBACK=1` it is raised as it is. Anything
    else is a fault of the program and keeps its traceback. This package's own warnings are
    sentences, too."""
    os.environ.update(told_to_torch())
    with usable_streams():
        return _run(main, prog)


def _run(main: Callable[[], object], prog: str) -> int:
    try:
        with _own_warnings_as_sentences(prog), _ended_by_sigterm():
            code = main()
            sys.stdout.flush()  # what it could not take is known here
    except _Terminated:
        print(f"{prog}: ended by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + _SIGPIPE
        full = is_disk_full(error)
        # Of torch by its name: most commands end without importing it.
        crowded = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        expected = full or crowded or isinstance(error, ValueError | OSError)
        if not expected or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        # Messages of the libraries underneath may run over several lines, or quote all of a value.
        sentence = " ".join(str(error).split()) or type(error).__name__
        if len(sentence) > _LONGEST:
            sentence = f"{sentence[: _LONGEST // 2]} [..] {sentence[-_LONGEST // 2 :]}"
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            cannot = "cannot be read or written"
            if error.filename2 is not None:
                cannot = f"cannot be copied or moved to {str(error.filename2)!r}"
            sentence = f"{str(error.filename)!r} {cannot} ({error.strerror})"
        if full:
            sentence = f"a file could not be written, is the disk full? ({sentence})"
        if crowded:
            sentence = f"the memory is full: take smaller batches or shorter texts ({sentence})"
        # It may quote a stranger's file, which could steer a terminal.
        sentence = "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence)
        sentence = without_passwords(sentence)
        print(f"{prog}: error: {sentence}", file=sys.stderr)
        return 2
    finally:
        forget_choices()
    return code if isinstance(code, int) else 0


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that is closed at its other end; what it still holds is
    then dropped, of which Python would complain in the end."""
    try:
        output, poll = sys.stdout.fileno(), select.poll()
    except (AttributeError, OSError):  # no file, or a system that does not tell
        return False
    poll.register(output, 0)
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


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

    ignored = sys.unraisablehook
    again: threading.Timer | None = None

    def once_more(left: sys.UnraisableHookArgs) -> None:
        # Python drops what is raised within `__del__`, and the program would run on.
        nonlocal again
        if not isinstance(left.exc_value, _Terminated):
            ignored(left)
            return
        signal.signal(signal.SIGTERM, terminate)
        again = threading.Timer(_AGAIN, os.kill, (process, signal.SIGTERM))
        again.daemon = True
        again.start()

    signal.signal(signal.SIGTERM, terminate)
    sys.unraisablehook = once_more
    try:
        yield
        if again is not None:  # the block was done before the signal came once more
            raise _Terminated(128 + signal.SIGTERM)
    except Exception as error:
        if came:  # compiled code makes an error of its own of what is raised in the middle of it
            raise _Terminated(128 + signal.SIGTERM) from error
        raise
    finally:
        if again is not None:
            again.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.unraisablehook = ignored


@contextmanager
def _own_warnings_as_sentences(prog: str) -> Iterator[None]:
    show = warnings.showwarning
    of_library = logging.getLogger(_NOISE[0])

    def show_sentence(
        message: Warning | str, category: type[Warning], *place: Any, **more: Any
    ) -> None:
        if issubclass(category, MedusaWarning):
            print(f"{prog}: warning: {message}", file=sys.stderr)
        else:
            show(message, category, *place, **more)

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_NOISE[1])

    warnings.showwarning = show_sentence
    of_library.addFilter(is_news)
    try:
        yield
    finally:
        of_library.removeFilter(is_news)
        warnings.showwarning = show


def parse_arguments(
    types: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    positional: Sequence[str] = (),
    presets: Presets = MappingProxyType({}),
) -> tuple[Any, ...]:
    """Read one instance of each dataclass from flags and, underneath them, `--config FILE.yaml`.
    Flags are transformers' (`--num_heads` or `--num-heads`); a flag beats the file, the file beats
    a preset, a preset beats the default. `presets` are flags by name; each of their values stands
    for values of other flags. The flags named by `positional` may also be given first, without
    their names. What is unknown or does not fit is a ValueError, in one sentence that names the
    nearest known flag."""
    parser = make_parser(types, prog, description, positional)
    given = list(sys.argv[1:] if argv is None else argv)
    for place, name in enumerate(positional):
        if len(given) <= 2 * place or given[2 * place].startswith("-"):
            break
        given.insert(2 * place, f"--{name}")
    before = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", *presets):
        before.add_argument(f"--{name}", nargs="?")
    said = vars(before.parse_known_args(given)[0])
    path = said.pop("config")
    of_file: dict[str, Any] = {}
    if path is not None and not {"-h", "--help"} & set(given):
        of_file = read_config(path, types)
    for name, choices in presets.items():
        parser.set_defaults(**choices.get(said[name] or of_file.get(name) or "", {}))
    parser.set_defaults(**of_file)
    # argparse would ask for a required flag even where the file has it, and before it names a
    # misspelt one.
    required = [action for action in parser._actions if action.required]
    for action in required:
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
        behind = given[given.index(surplus[0]) + 1 :]
        raise ValueError(explain_flag(surplus[0], behind[0] if behind else None, known))
    for action in required:
        if getattr(namespace, action.dest) in (None, []):
            what = (action.help or "").rstrip(".")
            raise ValueError(
                f"--{action.dest} is missing: give it as a flag or in the --config file ({what})"
            )
    parsed = tuple(_made(kind, namespace) for kind in types)
    if argv is None:
        sys.argv[1:] = masked(sys.argv[1:])  # which trackers of training runs keep whole
    return parsed


def _made(kind: type, given: Namespace) -> Any:
    """An instance, from its flags; a mistake is told by the name of the flag."""
    flags = {part.name: name for part in fields(kind) if (name := flag_name(part)) is not None}
    try:
        return kind(**{own: getattr(given, flag) for own, flag in flags.items()})
    except ValueError as error:
        first, _, rest = str(error).partition(" ")
        if flags.get(first, first) == first:
            raise
        raise ValueError(f"{flags[first]} {rest}") from error


def arguments_of(work: Callable[..., object]) -> tuple[type, ...]:
    """The dataclasses that a command's work is given, by its annotations."""
    return tuple(kind for name, kind in get_type_hints(work).items() if name != "return")


def command(
    prog: str,
    work: Callable[..., object],
    description: str | None,
    *positional: str,
    presets: Presets = MappingProxyType({}),
) -> Callable[..., int]:
    """The entry point of a command: does the work with the dataclasses of its arguments. See
    `parse_arguments`."""

    def main(argv: Sequence[str] | None = None) -> int:
        def parse_and_work() -> object:
            told: dict[str, Any] = {"prog": prog, "description": description or ""}
            told |= {"positional": positional, "presets": presets}
            return work(*parse_arguments(arguments_of(work), argv, **told))

        return run_command(parse_and_work, prog=prog.split()[0])

    return main
