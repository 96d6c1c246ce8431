"""`medusa-heads pull user/name [OUT]`: a checkpoint from a hub, in a folder of its own."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag


@dataclass
class PullArguments:
    """What to pull, and where to."""

    repo_id: str = flag(MISSING, "Repository, as user/name or user/name@revision.")
    out: str | None = flag(None, "Folder to write. Default: one of the repository's name, here.")
    revision: str | None = flag(None, "Branch, tag or commit. Default: main.")
    overwrite: bool = flag(False, "Replace the checkpoint that is in the folder.")


def pull_heads(arguments: PullArguments) -> None:
    """Download, and say where it is; ValueError where that cannot be, or the folder is in use."""
    from medusa_heads.hub.pull import pull

    print(f"Checkpoint: {pull(**asdict(arguments))}")


main = command("medusa-heads pull", pull_heads, __doc__, "repo_id", "out")
