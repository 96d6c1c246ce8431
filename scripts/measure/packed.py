"""A target's forward of few tokens, by its own matrices and by packed ones, and as a script, in
turns.

python -m scripts.measure.packed
python -m scripts.measure.packed --target TARGET --threads 2 --dtype bfloat16

Medians of the rounds. Large matrices are packed whether that pays on this machine or not; for
scripts, which choose among few tokens as well, where it does.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.environment import told_to_torch
from medusa_heads.settings import flag

os.environ.update(told_to_torch())

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_WARM_UP = 2  # rounds


@dataclass
class Arguments:
    """What to measure."""

    target: str = flag("assets/demo-target", "folder or hub id")
    dtype: Literal["bfloat16", "float32"] = flag("float32", "of the target")
    threads: int = flag(1, "of the CPU")
    context: int = flag(128, "tokens of the text before")
    rounds: int = flag(21, "of which the median is taken")


def measure(arguments: Arguments) -> None:
    """Print a table."""
    import torch
    from rich.console import Console
    from transformers import DynamicCache

    from medusa_heads import TargetModel
    from medusa_heads.inference.adapt.step_bench import RandomChain, StepBench
    from medusa_heads.machine.products import Shape, packed_gain
    from medusa_heads.tables import on_screen
    from medusa_heads.target.graphs.scripted import ScriptedTarget
    from medusa_heads.target.packed.matrices import PackedMatrices

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    target = TargetModel.from_pretrained(arguments.target, dtype=dtype, device="cpu")
    matrices, model = PackedMatrices(target.model, measured=False), target.model
    cache: Any = DynamicCache(config=model.config)
    given: Any = {target.cache_argument: cache}
    seconds: dict[tuple[int, bool | str], list[float]] = {}
    scripted, slots = ScriptedTarget(model), arguments.context + max(TOKENS)
    with torch.inference_mode():
        model(torch.randint(target.vocab_size, (1, arguments.context)), **given)
        bench = StepBench(scripted, arguments.context, 1, (cache, slots))
        for number in range(_WARM_UP + arguments.rounds):
            for tokens in TOKENS:
                ids_1T = torch.randint(target.vocab_size, (1, tokens))
                for is_packed in (False, True):
                    with matrices.instead(tokens if is_packed else 0):
                        started = time.perf_counter()
                        model(ids_1T, **given)
                        taken = time.perf_counter() - started
                    cache.crop(-tokens)
                    if number >= _WARM_UP:
                        seconds.setdefault((tokens, is_packed), []).append(taken)
                chain = RandomChain(tokens - 1, target.vocab_size)
                with scripted.capture_hidden():
                    steps = [bench.time(chain).step for _ in range(2)]
                if number >= _WARM_UP:
                    seconds.setdefault((tokens, "script"), []).append(steps[-1])
    one = median(seconds[1, False])
    shape = Shape.of(target.config)
    for outputs in (shape.intermediate, shape.vocab):
        gain = packed_gain(dtype, outputs, shape.hidden)
        print(f"{outputs} x {shape.hidden}: packed {gain:.2f} times as fast, as measured")
    columns = ("tokens", "milliseconds", "packed", "over its own", "over one token's")
    cells = []
    for tokens in TOKENS:
        own, other, script = (median(seconds[tokens, how]) for how in (False, True, "script"))
        times = [f"{1e3 * taken:.2f}" for taken in (own, other, script)]
        shares = (f"{other / own:.2f}", f"{own / one:.2f}, {other / one:.2f}")
        cells.append([str(tokens), *times[:2], *shares, times[2]])
    title = f"Forwards, {arguments.dtype}, threads: {arguments.threads}"
    Console().print(on_screen(title, ((*columns, "a step by a script"), cells)))


main = command("scripts.measure.packed", measure, __doc__)

if __name__ == "__main__":
    sys.exit(main())
