"""`medusa-heads push CHECKPOINT user/name`: heads on a hub, with a model card made of their report.

The token is the one that `hf auth login` stored, or HF_TOKEN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medusa_heads.cli.arguments import parse_arguments, run_command

if TYPE_CHECKING:
    from medusa_heads.hub.push import Push


@dataclass
class PushArguments:
    """What to push, and where to."""

    checkpoint: str = field(metadata={"help": "heads checkpoint: a folder written by train-heads"})
    repo_id: str = field(metadata={"help": "repository, as user/name; made where there is none"})
    private: bool = field(default=False, metadata={"help": "a repository made here is private"})
    revision: str | None = field(
        default=None, metadata={"help": "branch to push to; made where there is none"}
    )
    create_pr: bool = field(
        default=False, metadata={"help": "propose the files as a pull request instead"}
    )
    commit_message: str | None = field(default=None, metadata={"help": "of the one commit"})
    base_model: str | None = field(
        default=None,
        metadata={
            "help": "the target's name on the hub, user/name or user/name@revision, where the "
            "heads were trained from a local copy"
        },
    )
    license: str | None = field(
        default=None, metadata={"help": "of the heads, such as apache-2.0; default: none stated"}
    )
    benchmark: str | None = field(
        default=None,
        metadata={"help": "folder that medusa-heads benchmark --report wrote, for the card"},
    )
    with_vocab_matrix: bool = field(
        default=False,
        metadata={
            "help": "publish the copy of the target's vocabulary matrix that lies beside the heads "
            "too; it is under the target's licence"
        },
    )
    dry_run: bool = field(
        default=False, metadata={"help": "list the files with their sizes; asks no hub"}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> None:
        (arguments,) = parse_arguments(
            (PushArguments,),
            argv,
            prog="medusa-heads push",
            description=__doc__ or "",
            positional=("checkpoint", "repo_id"),
        )
        run_push(arguments)

    return run_command(work)


def run_push(arguments: PushArguments) -> None:
    """Show what is pushed, push it unless it is a dry run, and say where it is.

    Raises:
        ValueError: checkpoint, name or token is unusable, or the hub refuses.
    """
    from medusa_heads.hub.push import prepare_push, push

    prepared = prepare_push(
        arguments.checkpoint,
        arguments.repo_id,
        base_model=arguments.base_model,
        license=arguments.license,
        benchmark=arguments.benchmark,
        with_vocab_matrix=arguments.with_vocab_matrix,
    )
    _show(prepared)
    if arguments.dry_run:
        print("Nothing was pushed: this is a dry run")
        return
    address = push(
        prepared,
        private=arguments.private,
        revision=arguments.revision,
        create_pr=arguments.create_pr,
        commit_message=arguments.commit_message,
    )
    print(f"{'Proposed' if arguments.create_pr else 'Pushed'}: {address}")


def _show(prepared: Push) -> None:
    sizes = prepared.sizes()
    width = max(map(len, sizes))
    for name, size in sizes.items():
        print(f"{name:<{width}}  {size:>13,} bytes")
    print(f"{len(sizes)} files, {sum(sizes.values()):,} bytes, for {prepared.repo_id}")
