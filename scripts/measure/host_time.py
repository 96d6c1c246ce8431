"""How long the host works on each whole step, besides what the graph of it takes.

Seconds of the processor in this thread from one step of a text to the next, less those within the
graph, medians. On a GPU a graph is replayed, and this is what remains for the host. The first step
of each number of nodes in a text takes more: what its graph was made for is looked at then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from medusa_heads.inference.engine.reading import Reading
from medusa_heads.inference.models.assisted import AssistedModel


class Timed:
    """A backend that runs graphs as they are, and adds up what they take."""

    seconds = 0.0

    def __call__(self, module: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            began = time.thread_time()
            outputs = module.forward(*inputs)
            self.seconds += time.thread_time() - began
            return outputs

        return run


def seconds_of_step(model: AssistedModel, graphs: Timed, new_tokens: int, **given: Any) -> float:
    """Seconds of the host, of a usual step."""
    steps = list[float]()
    goes_on = Reading.goes_on

    def noted(*args: Any) -> bool:
        steps.append(time.thread_time() - graphs.seconds)
        return goes_on(*args)

    with patch.object(Reading, "goes_on", noted):
        for _ in range(2):  # the first text makes what is kept
            steps.clear()
            torch.manual_seed(0)
            model.generate(**given, max_new_tokens=new_tokens)
    return median(after - before for before, after in pairwise(steps))
