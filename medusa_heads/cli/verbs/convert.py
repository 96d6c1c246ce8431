"""`medusa-heads convert SOURCE OUT`: another project's heads (FasterDecoding, TGI, LoRAX, vLLM,
ModelOpt, Hydra, EAGLE-3, DFlash, DSpark; a file, a folder or a hub id) as a checkpoint of this
package.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass

from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.verbs.calibrate import CalibrateArguments, calibrate
from medusa_heads.config import HeadsConfig
from medusa_heads.data.finding import find_names
from medusa_heads.interop import ReadFormat
from medusa_heads.masking import without_passwords
from medusa_heads.settings import flag
from medusa_heads.shared_flags import MatrixFlag, RemoteCodeFlag


@dataclass
class ConvertArguments(MatrixFlag, RemoteCodeFlag):
    """What to read, and where to write it."""

    source: str = flag(MISSING, "File, folder or hub id that holds the heads.")
    out: str = flag(MISSING, "Folder to write. It must be empty, or not exist yet.")
    source_format: ReadFormat | None = flag(
        None,
        "Layout of the source, if the names of its tensors do not show it.",
        aliases=["--from"],
    )
    revision: str | None = flag(None, "Branch, tag or commit of the source. Default: main.")
    target: str | None = flag(None, "Hub id or folder of the target, kept with its lm_head's hash.")
    extract_target: bool = flag(
        False, "Write the model that the heads lie in, without them, to OUT/target."
    )
    corpus: list[str] = flag(
        [], "Text to measure the heads on, as medusa-heads calibrate does; loads the target."
    )


def convert(arguments: ConvertArguments) -> None:
    """Convert, say what was found, and measure the heads where there is text."""
    if arguments.corpus:
        find_names(arguments.corpus)  # a mistyped path is answered before anything is written
    from medusa_heads.interop.convert import convert_heads

    given = asdict(arguments)
    del given["corpus"]
    converted = convert_heads(**given)
    print(f"{converted.format}: {_describe(converted.stored.config)}")
    for notice in converted.notices:
        print(f"note: {without_passwords(notice)}")  # it may quote what a stranger's file names
    print(f"written to {converted.folder}")
    if not arguments.corpus:
        return
    try:
        calibrate(
            CalibrateArguments(
                arguments.out,
                target=arguments.target,
                trust_remote_code=arguments.trust_remote_code,
                dataset=arguments.corpus,
            )
        )
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the heads were written to {arguments.out!r}, but not measured: {error}; do it with "
            "medusa-heads calibrate"
        ) from error


def _describe(config: HeadsConfig) -> str:
    if config.vocab_matrix == "shared":
        matrix = "the target's vocabulary matrix"
    else:  # one for all steps of a layer, and all queries of a block
        each = "each" if config.kind in ("medusa", "hydra") else "of their own"
        matrix = f"a vocabulary matrix {each}"
    return (
        f"{config.num_heads} {config.kind} heads of {config.num_layers} "
        f"block{'s' if config.num_layers > 1 else ''} and {matrix}, "
        f"{config.num_candidates} tokens wide"
    )


main = command("medusa-heads convert", convert, __doc__, "source", "out")
