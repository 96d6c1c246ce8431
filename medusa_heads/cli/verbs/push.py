"""`medusa-heads push CHECKPOINT user/name`: heads on a hub, with a model card made of their report.

The token is the one that `hf auth login` stored, or HF_TOKEN.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag
from medusa_heads.shared_flags import MatrixFlag


@dataclass
class PushArguments(MatrixFlag):
    """What to push, and where to."""

    checkpoint: str = flag(MISSING, "Heads checkpoint: a folder written by train-heads.")
    repo_id: str = flag(MISSING, "Repository, as user/name. Made if there is none.")
    private: bool = flag(False, "Make a new repository private.")
    revision: str | None = flag(None, "Branch to push to. Made if there is none. Default: main.")
    create_pr: bool = flag(False, "Open a pull request instead of pushing to the branch.")
    commit_message: str | None = flag(None, "Message of the commit.")
    base_model: str | None = flag(
        None,
        "The target's name on the hub, user/name or user/name@revision. Needed if the heads were "
        "trained on a local copy of it.",
    )
    license: str | None = flag(None, "Licence of the heads, such as apache-2.0. Default: unstated.")
    benchmark: str | None = flag(None, "Folder of medusa-heads benchmark --report, for the card.")
    dry_run: bool = flag(False, "List the files with their sizes, without asking a hub.")


def push_heads(arguments: PushArguments) -> None:
    """Show what is pushed, push it unless it is a dry run, and say where it is."""
    from medusa_heads.hub.push import prepare_push, push

    given = asdict(arguments)
    content = ("checkpoint", "repo_id", "base_model", "license", "benchmark", "with_vocab_matrix")
    prepared = prepare_push(**{name: given[name] for name in content})
    sizes = prepared.sizes()
    width = max(map(len, sizes))
    for name, size in sizes.items():
        print(f"{name:<{width}}  {size:>13,} bytes")
    print(f"{len(sizes)} files, {sum(sizes.values()):,} bytes, for {prepared.repo_id}")
    if arguments.dry_run:
        print("Nothing was pushed: this is a dry run")
        return
    commit = ("private", "revision", "create_pr", "commit_message")
    address = push(prepared, **{name: given[name] for name in commit})
    print(f"{'Proposed' if arguments.create_pr else 'Pushed'}: {address}")


main = command("medusa-heads push", push_heads, __doc__, "checkpoint", "repo_id")
