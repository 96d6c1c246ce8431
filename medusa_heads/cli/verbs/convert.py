"""`medusa-heads convert SOURCE OUT`: another project's heads (FasterDecoding, TGI, LoRAX, vLLM,
ModelOpt, Hydra; a file, a folder or a hub id) as a checkpoint of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medusa_heads.cli.flags.arguments import parse_arguments, run_command
from medusa_heads.interop import ReadFormat

if TYPE_CHECKING:
    from medusa_heads.config import HeadsConfig


@dataclass
class ConvertArguments:
    """What to read, and where to write it."""

    source: str = field(metadata={"help": "File, folder or hub id that holds the heads."})
    out: str = field(metadata={"help": "Folder to write. It must be empty, or not exist yet."})
    source_format: ReadFormat | None = field(
        default=None,
        metadata={
            "aliases": ["--from"],
            "help": "Layout of the source, if the names of its tensors do not show it.",
        },
    )
    revision: str | None = field(
        default=None,
        metadata={"help": "Branch, tag or commit of the source on the hub. Default: main."},
    )
    target: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder of the heads' target, recorded with a hash of its lm_head."
        },
    )
    extract_target: bool = field(
        default=False,
        metadata={
            "help": "If the source is a whole model with heads in it, write the model without them "
            "to OUT/target."
        },
    )
    corpus: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Text to measure the heads on, as the --dataset of medusa-heads calibrate. "
            "This loads the target."
        },
    )
    with_vocab_matrix: bool = field(
        default=False,
        metadata={
            "help": "Lay a copy of the target's vocabulary matrix beside heads that share it, with "
            "which vLLM 0.32 reads the folder as it is."
        },
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run code that comes with the target's configuration."}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> None:
        (arguments,) = parse_arguments(
            (ConvertArguments,),
            argv,
            prog="medusa-heads convert",
            description=__doc__ or "",
            positional=("source", "out"),
        )
        run_convert(arguments)

    return run_command(work)


def run_convert(arguments: ConvertArguments) -> None:
    """Convert, and say what was found.

    Raises:
        ValueError: nothing to convert, or nothing that can be held.
        OSError: the folder cannot be written.
    """
    if arguments.corpus:
        from medusa_heads.data.finding import find_names

        find_names(arguments.corpus)  # a mistyped path is answered before anything is written

    from medusa_heads.interop.convert import convert_heads

    converted = convert_heads(
        arguments.source,
        arguments.out,
        source_format=arguments.source_format,
        revision=arguments.revision,
        target=arguments.target,
        extract_target=arguments.extract_target,
        with_vocab_matrix=arguments.with_vocab_matrix,
        trust_remote_code=arguments.trust_remote_code,
    )
    print(f"{converted.format}: {describe(converted.stored.config)}")
    for notice in converted.notices:
        print(f"note: {notice}")
    print(f"written to {converted.folder}")
    if arguments.corpus:
        _measure(arguments)


def _measure(arguments: ConvertArguments) -> None:
    from medusa_heads.cli.verbs.calibrate import CalibrateArguments, calibrate

    to_measure = CalibrateArguments(
        arguments.out,
        target=arguments.target,
        trust_remote_code=arguments.trust_remote_code,
        dataset=arguments.corpus,
    )
    try:
        calibrate(to_measure)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the heads were written to {arguments.out!r}, but not measured: {error}; do it with "
            "medusa-heads calibrate"
        ) from error


def describe(config: HeadsConfig) -> str:
    """Heads in a few words."""
    matrices = "the target's" if config.vocab_matrix == "shared" else "a"
    each = "" if config.vocab_matrix == "shared" else " each"
    return (
        f"{config.num_heads} {config.kind} heads of {config.num_layers} "
        f"block{'s' if config.num_layers > 1 else ''} and {matrices} vocabulary matrix{each}, "
        f"{config.num_candidates} tokens wide"
    )
