"""Grow a trained small Llama or Qwen3.5 hybrid, and heads trained on it, to the size of a large
model: the same text at its cost.

python -m scripts.grown.target assets/demo-target runs/0.1b --shape 0.1b --heads runs/demo/heads
python -m scripts.grown.target assets/demo-target runs/grown --shape 1b --num_hidden_layers 12
python -m scripts.grown.target assets/demo-target runs/wide --hidden_size 768 --rotate 0

Speed can so be measured at a size that nothing needs to be downloaded for, with the acceptance that
trained heads really have. What is written says that it was grown (`grown_from` in config.json), and
whatever is reported of it must say so too. The matrices are stored and multiplied in full: what was
added costs what any weights cost, zeros or not. Zeros alone might still be cheaper to move or draw
less power, so noise stands wherever nothing reads it. Two things are unlike a model that was
trained at that size: layers and heads that were added do nothing, so that leaving out layers says
nothing of real models, and acceptance is the small model's.

`--rotate` gives the target a random basis, in which no channel is empty and the norms weigh all of
them alike: a target to train heads for at its width.

OUTPUT/target is an ordinary transformers model, OUTPUT/heads a checkpoint for it.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from medusa_heads.checkpoint.files import staged
from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag


@dataclass
class Arguments:
    """What to grow, and to which size."""

    target: str = flag(MISSING, "hub id or folder of a Llama, or of a Qwen3.5 hybrid")
    output: str = flag(MISSING, "folder for target/ and heads/")
    shape: Literal["0.1b", "1b", "7b"] | None = flag(
        None, "sizes of a model; by default the target's own"
    )
    hidden_size: int | None = flag(None, "instead of the shape's")
    intermediate_size: int | None = flag(None, "instead of the shape's")
    num_hidden_layers: int | None = flag(None, "instead of the shape's")
    num_attention_heads: int | None = flag(None, "instead of the shape's")
    num_key_value_heads: int | None = flag(None, "instead of the shape's")
    head_dim: int | None = flag(None, "instead of the shape's")
    vocab_size: int | None = flag(None, "instead of the shape's")
    heads: str | None = flag(None, "heads checkpoint of the target, to be grown with it")
    dtype: Literal["auto", "bfloat16", "float32"] = flag(
        "auto",
        "of what is written; auto: the fastest on this machine; in bfloat16 rescaled "
        "weights are rounded anew",
    )
    seed: int = flag(0, "of the noise in weights that nothing reads")
    rotate: int | None = flag(
        None, "seed of a random basis for the target, in which every channel is used"
    )


def grow(arguments: Arguments) -> None:
    """Grow target and heads, compare them with the small ones, and write them.

    Raises:
        ValueError: target, heads or shape cannot be grown, or something stands at the output.
    """
    output = Path(arguments.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"expected no folder, or an empty one, at {str(output)!r}")
    from rich.console import Console

    from medusa_heads.checkpoint.checkpoint import save_heads
    from medusa_heads.machine.choice import choose
    from medusa_heads.machine.products import Shape as Sizes
    from scripts.grown.heads import provenance_of_grown
    from scripts.grown.model import grow as grow_in_memory
    from scripts.grown.model import load_small
    from scripts.grown.shape import SHAPES, Shape

    console = Console(soft_wrap=True, highlight=False)
    small = load_small(arguments.target)
    own = Shape.of(small.config)
    shape = own if arguments.shape is None else SHAPES[arguments.shape]
    shape = shape.with_sizes({name: getattr(arguments, name) for name in own.names()})
    if shape == own and arguments.rotate is None:
        raise ValueError("nothing would grow: give --shape or sizes above the target's")
    choice = choose("tree", device="cpu", dtype=arguments.dtype, shape=Sizes.of(shape))
    dtype = choice.dtype
    seeds: dict[str, Any] = {"seed": arguments.seed, "rotation": arguments.rotate}
    grown = grow_in_memory(small, arguments.heads, shape, dtype=dtype, **seeds)
    model: Any = grown.target.model
    model.config._name_or_path = str(output / "target")
    for what, (difference, spread) in grown.differences().items():
        console.print(f"{what}: logits differ by {difference:.2g} at most, spread {spread:.2g}")
    output.mkdir(parents=True, exist_ok=True)
    _write_target(model, arguments.target, output / "target")
    count = sum(parameter.numel() for parameter in model.parameters())
    written = f"Written: {output / 'target'}, {count / 1e6:.1f} M parameters"
    console.print(f"{written}, {choice.reason}")
    if grown.loaded is not None and grown.heads is not None:
        save_heads(
            output / "heads",
            grown.heads,
            grown.target,
            statistics=grown.loaded.statistics,
            provenance=provenance_of_grown(grown.loaded, grown.place),
            dtype=dtype,
        )
        console.print(f"Written: {output / 'heads'}")


def _write_target(model: Any, came_from: str, folder: Path) -> None:
    """Beside its place first, with the tokenizer of the model it was made of, if that has one."""
    from transformers import AutoTokenizer

    with staged(folder) as made:
        model.save_pretrained(made)
        try:
            AutoTokenizer.from_pretrained(came_from).save_pretrained(made)
        except (OSError, ValueError):
            print("no tokenizer lies beside the target: none is written", file=sys.stderr)


main = command("scripts.grown.target", grow, __doc__, "target", "output")

if __name__ == "__main__":
    sys.exit(main())
