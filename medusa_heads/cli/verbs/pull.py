"""`medusa-heads pull user/name [OUT]`: a checkpoint from a hub, in a folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from medusa_heads.cli.flags.arguments import parse_arguments, run_command


@dataclass
class PullArguments:
    """What to pull, and where to."""

    repo_id: str = field(metadata={"help": "Repository, as user/name or user/name@revision."})
    out: str | None = field(
        default=None,
        metadata={"help": "Folder to write. Default: one of the repository's name, here."},
    )
    revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit. Default: main."}
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Replace the checkpoint that is in the folder."}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> None:
        (arguments,) = parse_arguments(
            (PullArguments,),
            argv,
            prog="medusa-heads pull",
            description=__doc__ or "",
            positional=("repo_id", "out"),
        )
        run_pull(arguments)

    return run_command(work)


def run_pull(arguments: PullArguments) -> None:
    """Download, and say where it is.

    Raises:
        ValueError: no such repository, no heads in it, or the folder is in use.
    """
    from medusa_heads.hub.pull import pull

    folder = pull(
        arguments.repo_id,
        arguments.out,
        revision=arguments.revision,
        overwrite=arguments.overwrite,
    )
    print(f"Checkpoint: {folder}")
