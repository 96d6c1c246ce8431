"""What this machine is, what is chosen on it and why: to be pasted into a report of a bug.

medusa-heads env
medusa-heads env Qwen/Qwen2.5-0.5B
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag
from medusa_heads.shared_flags import DeviceFlag, RemoteCodeFlag

if TYPE_CHECKING:
    from medusa_heads.machine.products import Use

VERSIONS = ("torch", "transformers", "accelerate", "datasets", "peft", "safetensors")
USES: dict[Use, str] = {
    "decode": "plain decoding, 1 row",
    "tree": "a tree of 16 nodes",
    "batch": "many rows",
    "train": "training",
}


@dataclass
class EnvArguments(DeviceFlag, RemoteCodeFlag):
    """What to show."""

    target: str | None = flag(
        None,
        "A target: a folder, or user/name[@revision] on a hub. Default: sizes of a small one.",
    )


def show(arguments: EnvArguments) -> None:
    """Print lines none of which names a user or a secret; the first stand there should a
    measurement fail.
    """
    from medusa_heads.contents import refuse_adapter, refuse_heads
    from medusa_heads.hub.names import split_revision
    from medusa_heads.machine import choice, devices, facts, measurements, products
    from medusa_heads.target.loading import stored_form

    say = partial(print, flush=True)
    where = str(devices.find_device(arguments.device))
    form = None
    if arguments.target is not None:
        refuse_heads(arguments.target)
        refuse_adapter(arguments.target)
        name, revision = split_revision(arguments.target)
        trusted = arguments.trust_remote_code
        form = stored_form(name, revision=revision, trust_remote_code=trusted)
        if form is None:
            code = "" if trusted else " (one with code of its own needs --trust_remote_code)"
            raise ValueError(
                f"expected a causal language model (a hub id or a local folder) at "
                f"{arguments.target!r}, found none{code}"
            )
        if form.dtype is None:
            raise ValueError(
                f"the model at {arguments.target!r} is quantised, of which nothing is measured: "
                "name one that is not, or none"
            )
    versions = [f"{name} {metadata.version(name)}" for name in VERSIONS]
    package = f"medusa-heads {metadata.version('medusa-heads')}"
    say(", ".join([package, f"Python {platform.python_version()}", *versions]))
    for name, value in facts.describe_machine().items():
        if name not in ("python", *VERSIONS):
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            say(f"{name}: {'not set' if value is None else shown}")
    say(f"devices: {', '.join(map(str, devices.devices_here()))}")
    say(f"measured on {where}, in speeds relative to float32:")
    shape = products.Shape() if form is None else form.shape
    chosen: dict[Use, choice.Choice] = {}
    for use, purpose in USES.items():
        stored = None if form is None or use == "train" else form.dtype
        chosen[use] = choice.choose(use, device=where, stored=stored, shape=shape)
        say(f"  {purpose}: {chosen[use]}")
        found = choice.speeds(use, device=where, stored=stored, shape=shape)
        each = (
            f"{dtype} on {count} thread{'s'[: count != 1]} {speed:.2f}"
            for (dtype, count), speed in found.items()
        )
        say("    " + ", ".join(each))
    if where == "cpu" and (gain := products.int8_gain(chosen["tree"].dtype)):
        say(f"  drafts in eight bits: {gain:.2f} times the speed of the tree's dtype")
    sizes = (shape.intermediate, shape.hidden)
    if where == "cpu" and (gain := products.packed_gain(chosen["tree"].dtype, *sizes)):
        one = products.packed_gain(chosen["tree"].dtype, *sizes, "decode")
        times = f"{gain:.2f} times the speed of others for 8 rows, {one:.2f} for 1 row"
        say(f"  packed matrices: {times}")
    if where == "cpu":
        gain = products.turned_gain(chosen["tree"].dtype, *sizes)
        say(f"  matrices by columns: {gain:.2f} times the speed of others for 1 row")
    folder, home = str(measurements.measurement_folder()), os.path.expanduser("~")
    shown = "~" + folder.removeprefix(home) if folder.startswith(home + os.sep) else folder
    say(f"measurements are kept in {shown}")


main = command("medusa-heads env", show, __doc__, "target")
