"""A layer's attention over a cache of fixed size on a GPU: by torch's own kernel, and by the one
that graphs take where it is faster.

python -m scripts.measure.attention
python -m scripts.measure.attention --heads 28 --shared 4 --batch_sizes 8 --tokens 16 --slots 4096

Least times in CUDA graphs of many layers. The results are compared besides.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from typing import Literal

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag

COLUMNS = ("rows", "tokens", "slots", "in use", "torch (us)", "split (us)", "ratio", "difference")


@dataclass
class Arguments:
    """What to measure."""

    heads: int = flag(32, "of queries")
    shared: int = flag(8, "heads of keys")
    width: int = flag(128, "of a head")
    dtype: Literal["bfloat16", "float16", "float32"] = flag("bfloat16", "of the target")
    batch_sizes: list[int] = flag([1, 8], "rows")
    tokens: list[int] = flag([1, 16, 32], "of a tree, 64 at most")
    slots: list[int] = flag([2048, 16384], "of the cache")
    in_use: list[float] = flag([0.25, 1.0], "shares of the cache")


def measure(arguments: Arguments) -> None:
    """Print a table. Raises ValueError: there is no GPU."""
    import torch

    from medusa_heads.agreement import relative_error
    from medusa_heads.machine.attention import Attended, replayed, rivals
    from medusa_heads.machine.choice import as_dtype
    from medusa_heads.machine.devices import find_device
    from medusa_heads.tables import in_markdown

    device, dtype, of = find_device("cuda"), as_dtype(arguments.dtype), arguments
    print(
        f"{torch.cuda.get_device_name(device)}, {of.dtype}, {of.heads} heads, {of.shared} of keys"
    )
    print(in_markdown((COLUMNS, [])))
    for rows, tokens, slots, in_use in product(of.batch_sizes, of.tokens, of.slots, of.in_use):
        sizes = Attended(rows, of.heads, of.shared, tokens, slots, of.width, of.width)
        with torch.inference_mode():
            *both, layers = rivals(device, dtype, sizes, in_use)
            usual, split = replayed(both, layers)
            expected, got = (each(*layers[0]).flatten(0, -2).float() for each in both)
        numbers = [f"{1e6 * usual:.1f}", f"{1e6 * split:.1f}", f"{usual / split:.2f}"]
        differ = f"{relative_error(got, expected):.1g}"
        cells = [*map(str, (rows, tokens, slots)), f"{in_use:.0%}", *numbers, differ]
        # As they come: whoever runs this may have little time.
        print(in_markdown((COLUMNS, [cells])).splitlines()[-1], flush=True)


main = command("scripts.measure.attention", measure, __doc__)

if __name__ == "__main__":
    sys.exit(main())
