"""What the proofs on vLLM share: partly trained heads, what they must count, and engines.

They run by `make test-vllm`, in an environment of its own, and on a CPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import vllm

from medusa_heads.inference.serving.chain import SimulatedChain, simulate_chain
from tests.vllm import partly_trained

has_medusa = pytest.mark.skipif(
    tuple(map(int, vllm.__version__.split(".")[:2])) >= (0, 33),
    reason="vLLM 0.33 deleted its own Medusa",
)
PLUGIN = "medusa_heads.inference.serving.vllm.MedusaProposer"
_figures: list[str] = []
ENGINE = Path(__file__).with_name("engine.py")


@dataclass(frozen=True)
class Decoded:
    """What an engine made and counted."""

    texts: list[list[int]]
    counters: dict[str, Any]


def counters(simulated: SimulatedChain) -> dict[str, Any]:
    """What a simulation counted, by vLLM's names."""
    return {
        "vllm:spec_decode_num_drafts": simulated.drafts,
        "vllm:spec_decode_num_draft_tokens": simulated.draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": simulated.accepted,
        "vllm:spec_decode_num_accepted_tokens_per_pos": simulated.accepted_per_position,
    }


def engine_arguments(method: str, heads: Path, num_tokens: int) -> dict[str, Any]:
    """How the embedded model is served with heads: vLLM's own way, or through our plugin."""
    speculative = {"method": method, "num_speculative_tokens": num_tokens}
    common: dict[str, Any] = {
        "model": str(partly_trained.TARGET),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
    }
    if method in ("medusa", "eagle3"):
        return common | {"speculative_config": speculative | {"model": str(heads)}}
    return common | {
        "speculative_config": speculative | {"model": PLUGIN},
        "additional_config": {"medusa_heads": str(heads)},
    }


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an engine: one thread, little memory, no network."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache")),
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two processes want two NUMA nodes
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of partly trained heads of a kind, trained when first asked for."""

    @cache
    def trained(kind: str) -> Path:
        return partly_trained.train(kind, tmp_path_factory.mktemp("heads") / kind)

    return trained


@pytest.fixture(scope="session")
def simulated(checkpoint: Callable[[str], Path]) -> Callable[..., SimulatedChain]:
    """What heads of a kind must make and count."""

    @cache
    def simulate(kind: str, **settings: Any) -> SimulatedChain:
        target = partly_trained.load_target()
        heads = partly_trained.load(checkpoint(kind), target)
        settings = {"max_new_tokens": partly_trained.NEW_TOKENS} | settings
        made = simulate_chain(target, heads, partly_trained.prompts(), **settings)
        _figures.append(
            f"{kind}: {made.drafts} drafts of {made.draft_tokens} tokens, "
            f"{made.accepted} accepted, by head {made.accepted_per_position}"
        )
        return made

    return simulate


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was simulated, and so counted, as the last lines on the screen."""
    for line in [f"vLLM {vllm.__version__}", *_figures]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def decode(environment: dict[str, str]) -> Callable[..., Decoded]:
    """Decode the prompts with an engine of these arguments, in a process of its own."""

    def run(
        engine: dict[str, Any],
        *,
        max_tokens: int = partly_trained.NEW_TOKENS,
        sampling: dict[str, Any] | None = None,
    ) -> Decoded:
        settings = {
            "prompts": partly_trained.prompts(),
            "max_tokens": max_tokens,
            "sampling": {"ignore_eos": True} if sampling is None else sampling,
            "engine": engine,
        }
        result = subprocess.run(
            [sys.executable, str(ENGINE)],
            input=json.dumps(settings),
            env=environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            capture_output=True,
            text=True,
        )
        if result.returncode != 0:
            raise RuntimeError(result.stdout + result.stderr)  # workers write to the former
        return Decoded(**json.loads(result.stdout.splitlines()[-1]))

    return run
