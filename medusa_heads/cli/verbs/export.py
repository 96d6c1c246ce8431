"""`medusa-heads export CHECKPOINT OUT --to vllm`: a heads checkpoint in another engine's layout, or
multi-token-prediction modules that were trained, in a copy of their target (--to transformers).
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass

from medusa_heads.cli.flags.arguments import command
from medusa_heads.contents import is_mtp
from medusa_heads.files import expanded
from medusa_heads.interop import WrittenFormat
from medusa_heads.settings import flag
from medusa_heads.shared_flags import RemoteCodeFlag


@dataclass
class ExportArguments(RemoteCodeFlag):
    """What to write, and for whom."""

    checkpoint: str = flag(MISSING, "Heads checkpoint: a folder or hub id; or trained modules.")
    out: str = flag(MISSING, "Folder to write. It must be empty, or not exist yet.")
    to: WrittenFormat = flag(
        MISSING, "Engine or project that is to read it; of trained modules: transformers."
    )
    target: str | None = flag(None, "Hub id or folder of the target. Default: that of the heads.")
    target_gguf: str | None = flag(
        None, "The target's GGUF file, quantised or not, whose vocabulary --to gguf copies."
    )
    full_vocabulary: bool = flag(False, "Let heads of a reduced vocabulary draft all tokens.")


def export(arguments: ExportArguments) -> None:
    from medusa_heads.interop.export import export_heads, export_modules

    modules = is_mtp(expanded(arguments.checkpoint))
    exported = (export_modules if modules else export_heads)(**asdict(arguments))
    for notice in exported.notices:
        print(f"note: {notice}")
    print(f"written for {arguments.to} to {exported.folder}")


main = command("medusa-heads export", export, __doc__, "checkpoint", "out")
