"""What the host takes for a step, besides the graph of it."""

from __future__ import annotations

import pytest

from scripts.measure.host_time import Timed, seconds_of_step
from scripts.measure.host_waits import prompts
from tests.conftest import TinyLlama
from tests.inference.on_device import with_heads


@pytest.mark.slow
def test_a_step_of_the_host_is_shorter_than_its_graph(tiny_llama: TinyLlama) -> None:
    graphs = Timed()
    medusa = with_heads(tiny_llama(num_layers=1), graphs)
    given = prompts(medusa, 2) | {"do_sample": False}
    seconds = seconds_of_step(medusa, graphs, 20, **given)
    assert 0 < seconds < graphs.seconds
