"""What this machine is, what is chosen on it and why: to be pasted into a report of a bug.

medusa-heads env
medusa-heads env Qwen/Qwen2.5-0.5B
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from medusa_heads.cli.flags.arguments import parse_arguments, run_command

if TYPE_CHECKING:
    from medusa_heads.machine import Shape, Use
    from medusa_heads.target.loading import StoredForm

VERSIONS = ("torch", "transformers", "accelerate", "datasets", "peft", "safetensors")
USES: dict[Use, str] = {
    "decode": "plain decoding, 1 row",
    "tree": "a tree of 16 nodes",
    "batch": "many rows",
    "train": "training",
}


@dataclass
class EnvArguments:
    """What to show."""

    target: str | None = field(
        default=None,
        metadata={"help": "Hub id or folder of a target. Default: the sizes of a small one."},
    )
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda. Default: the best there is."}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> None:
        (arguments,) = parse_arguments(
            (EnvArguments,),
            argv,
            prog="medusa-heads env",
            description=__doc__ or "",
            positional="target",
        )
        # The first lines stand there should a measurement fail.
        for line in describe(arguments):
            print(line, flush=True)

    return run_command(work)


def describe(arguments: EnvArguments) -> Iterator[str]:
    """The lines, none of which names a user or a secret.

    Raises:
        ValueError: no such device or target.
    """
    from medusa_heads.machine import (
        Shape,
        describe_machine,
        devices_here,
        find_device,
        measurement_folder,
    )

    where = find_device(arguments.device)
    form = None if arguments.target is None else _form(arguments.target)
    versions = [f"{name} {metadata.version(name)}" for name in VERSIONS]
    package = f"medusa-heads {metadata.version('medusa-heads')}"
    yield ", ".join([package, f"Python {platform.python_version()}", *versions])
    for name, value in describe_machine().items():
        if name not in ("python", *VERSIONS):
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            yield f"{name}: {'not set' if value is None else shown}"
    yield f"devices: {', '.join(map(str, devices_here()))}"
    yield f"measured on {where}, in speeds relative to float32:"
    for use in USES:
        yield from _measured(use, str(where), Shape() if form is None else form.shape, form)
    folder, home = str(measurement_folder()), os.path.expanduser("~")
    shown = "~" + folder.removeprefix(home) if folder.startswith(home + os.sep) else folder
    yield f"measurements are kept in {shown}"


def _form(target: str) -> StoredForm:
    from medusa_heads.target.loading import stored_form

    form = stored_form(target)
    if form is None:
        raise ValueError(f"expected a causal language model, not quantised, at {target!r}")
    return form


def _measured(use: Use, device: str, shape: Shape, form: StoredForm | None) -> Iterator[str]:
    """What is chosen for a use, and the speeds it follows from."""
    from medusa_heads.machine import choose, speeds

    stored = None if form is None or use == "train" else form.dtype
    yield f"  {USES[use]}: {choose(use, device=device, stored=stored, shape=shape)}"
    found = speeds(use, device=device, stored=stored, shape=shape)
    yield "    " + ", ".join(
        f"{dtype} on {count} thread{'s'[: count != 1]} {speed:.2f}"
        for (dtype, count), speed in found.items()
    )
