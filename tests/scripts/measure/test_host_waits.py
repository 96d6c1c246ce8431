"""Every way to make the host wait for a device, or to build a tensor on the host, is counted."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from medusa_heads.errors import MedusaWarning
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree
from scripts.measure.host_waits import counted, graphs_of, main
from tests.conftest import TinyLlama
from tests.inference.on_device import with_heads

X, ONE = torch.arange(6.0).view(2, 3), torch.tensor(1)
MASK = torch.tensor([True, False])
WAYS: dict[str, tuple[str, Callable[[], Any]]] = {
    "item": ("read", lambda: ONE.item()),
    "bool": ("read", lambda: bool(ONE)),
    "int": ("read", lambda: int(ONE)),
    "float": ("read", lambda: float(ONE)),
    "index of a list": ("read", lambda: [1, 2][ONE]),
    "index of a tensor": ("read", lambda: X[ONE]),
    "length of a range": ("read", lambda: torch.arange(ONE)),  # type: ignore[call-overload]
    "comparison": ("read", lambda: (X > 9).any() or None),
    "torch.equal": ("read", lambda: torch.equal(X, X)),
    "tolist": ("read", lambda: X.tolist()),
    "cpu": ("read", lambda: X.cpu()),
    "numpy": ("read", lambda: X.numpy()),
    "np.asarray": ("read", lambda: np.asarray(X)),
    "nonzero": ("shape", lambda: MASK.nonzero()),
    "torch.where(mask)": ("shape", lambda: torch.where(MASK)),
    "masked_select": ("shape", lambda: X.masked_select(X > 1)),
    "x[mask]": ("shape", lambda: X[MASK]),
    "unique": ("shape", lambda: X.unique()),
    "torch.tensor": ("built", lambda: torch.tensor([1, 2])),
    "torch.as_tensor": ("built", lambda: torch.as_tensor([1, 2])),
    "from_numpy": ("built", lambda: torch.from_numpy(np.ones(2))),
    "new_tensor": ("built", lambda: X.new_tensor([1.0])),
    "x[list]": ("built", lambda: X[[0, 1]]),
    "to another device": ("copied", lambda: X.to("meta")),
    "copied to another device": ("copied", lambda: torch.empty(2, 3, device="meta").copy_(X)),
}


@pytest.mark.parametrize("name", WAYS)
def test_each_way_is_seen_once(name: str) -> None:
    kind, way = WAYS[name]
    with counted() as counts:
        way()
    assert counts == {kind: 1}


def test_what_stays_on_the_device_is_not_counted() -> None:
    with counted() as counts:
        chosen = X.index_select(1, torch.arange(2)).where(X[:, :2] > 1, 0.0)
        chosen[:, 1] = X[:, 0]
        chosen[..., -1:] = 0
        X.gather(1, (chosen.argmax(dim=1, keepdim=True)))
        torch.full((2,), 3.0).add_(1).scatter_(0, torch.zeros(2, dtype=torch.long), 2.0)
    assert not counts


FLAGS = ["--checkpoint", "assets/demo-heads", "--trees", "chain:2", "--new_tokens", "6"]


@pytest.mark.slow
def test_the_loop_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--batch_sizes", "2"]) == 0
    assert "sampled" in capsys.readouterr().out


def test_whole_steps_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--batch_sizes", "1", "--whole_steps"]) == 0
    greedy = next(line for line in capsys.readouterr().out.splitlines() if "greedy" in line)
    assert [float(each) for each in greedy.replace("│", " ").split()[3:]] == [1, 0, 0, 0]


@pytest.mark.slow
def test_the_host_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--checkpoint", "assets/demo-heads", "--trees", "chain:2", "--new_tokens", "6"]
    assert main([*flags, "--batch_sizes", "1", "--seconds"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "chain:2" in line]
    assert [float(row.split("│")[-2]) > 0 for row in rows] == [True, True]


@pytest.mark.slow
def test_graphs_are_counted(tiny_llama: TinyLlama) -> None:
    medusa = with_heads(tiny_llama(num_layers=1))
    assert graphs_of(medusa, 2, 20, do_sample=False) == (True, 1, 0)
    propose = medusa.drafter.propose

    def asking(state: DecodingState) -> TokenTree:
        return propose(state) if state.roots_B[0] >= 0 else TokenTree.root_only(state.roots_B)

    medusa.drafter.propose = asking  # type: ignore[method-assign]
    with pytest.warns(MedusaWarning, match="no graph"):
        whole, _, breaks = graphs_of(medusa, 2, 20, do_sample=False)
    assert not whole and breaks <= 1  # torch 2.9 counts none of what had to be one graph
