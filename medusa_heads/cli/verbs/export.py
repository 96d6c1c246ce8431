"""`medusa-heads export CHECKPOINT OUT --to vllm`: a heads checkpoint in another engine's layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from medusa_heads.cli.flags.arguments import parse_arguments, run_command
from medusa_heads.interop import WrittenFormat


@dataclass
class ExportArguments:
    """What to write, and for whom."""

    checkpoint: str = field(metadata={"help": "Heads checkpoint: a folder, or a hub id."})
    out: str = field(metadata={"help": "Folder to write. It must be empty, or not exist yet."})
    to: WrittenFormat = field(metadata={"help": "Engine or project that is to read it."})
    target: str | None = field(
        default=None,
        metadata={"help": "Hub id or folder of the target. Default: the one the checkpoint names."},
    )
    full_vocabulary: bool = field(
        default=False,
        metadata={"help": "Let heads with a reduced vocabulary draft all of the target's tokens."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run code that comes with the target's configuration."}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> None:
        (arguments,) = parse_arguments(
            (ExportArguments,),
            argv,
            prog="medusa-heads export",
            description=__doc__ or "",
            positional=("checkpoint", "out"),
        )
        run_export(arguments)

    return run_command(work)


def run_export(arguments: ExportArguments) -> None:
    """Export, and say what the user should know.

    Raises:
        ValueError: no checkpoint, or heads that the engine cannot hold.
        OSError: the folder cannot be written.
    """
    from medusa_heads.interop.export import export_heads

    exported = export_heads(
        arguments.checkpoint,
        arguments.out,
        arguments.to,
        target=arguments.target,
        full_vocabulary=arguments.full_vocabulary,
        trust_remote_code=arguments.trust_remote_code,
    )
    for notice in exported.notices:
        print(f"note: {notice}")
    print(f"written for {arguments.to} to {exported.folder}")
