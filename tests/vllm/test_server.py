"""The same through vLLM's OpenAI server over HTTP: texts from its API, counters from /metrics."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from medusa_heads.inference.serving.chain import SimulatedChain
from tests.vllm.conftest import counters, engine_arguments, has_medusa
from tests.vllm.partly_trained import NEW_TOKENS, NUM_HEADS, prompts

STARTING_SECONDS = 600  # on a busy machine
no_command = pytest.mark.skipif(
    not any(distribution.name == "vllm" for distribution in metadata.distributions()),
    reason="`vllm serve` looks for a package named vllm, which the CPU build is not",
)


@contextmanager
def server(
    engine: dict[str, Any], environment: dict[str, str], logs: Path, machines: int = 1
) -> Iterator[str]:
    """An OpenAI server with these arguments, spread as over so many machines; gives its address."""
    port, meeting_port = free_port(), free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    if machines > 1:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", engine["model"]]
        engine = {name: value for name, value in engine.items() if name != "model"} | {
            "tensor_parallel_size": machines,
            "nnodes": machines,
            "master_addr": "127.0.0.1",
            "master_port": meeting_port,
        }
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"]
    for name, value in engine.items():
        command.append(f"--{name.replace('_', '-')}")
        if value is not True:
            command.append(json.dumps(value) if isinstance(value, dict) else str(value))
    address = f"http://127.0.0.1:{port}"
    with ExitStack() as running:
        for rank in range(machines):
            of_node = ["--node-rank", str(rank)] if machines > 1 else []
            if rank > 0:
                of_node.append("--headless")
            log = running.enter_context((logs / f"server-{rank}.log").open("w"))
            process = subprocess.Popen(
                [*command, *of_node], env=environment, stdout=log, stderr=log
            )
            running.callback(stop, process)
            if rank == 0:
                first = process
        wait(address, first, logs / "server-0.log")
        yield address


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(log.read_text()[-4000:])


def read_counters(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, Any] = {}
    for family in families:
        for sample in family.samples:
            if not family.name.startswith("vllm:spec_decode") or "created" in sample.name:
                continue
            if "position" in sample.labels:
                places = found.setdefault(family.name, {})
                places[int(sample.labels["position"])] = int(sample.value)
            else:
                found[family.name] = int(sample.value)
    return {
        name: [count for _, count in sorted(value.items())] if isinstance(value, dict) else value
        for name, value in found.items()
    }


def check_over_http(address: str, expected: SimulatedChain) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    answer = client.completions.create(
        model="demo",
        prompt=prompts(),
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    texts: list[Any] = [choice.token_ids for choice in answer.choices]
    assert texts == expected.texts
    assert read_counters(address) == counters(expected)


@pytest.mark.parametrize(
    ("method", "kind"),
    [pytest.param("medusa", "shared", marks=has_medusa), ("custom_class", "own")],
)
def test_text_and_counters_over_http(
    checkpoint: Callable[[str], Path],
    simulated: Callable[..., SimulatedChain],
    environment: dict[str, str],
    tmp_path: Path,
    method: str,
    kind: str,
) -> None:
    engine = engine_arguments(method, checkpoint(kind), NUM_HEADS)
    with server(engine, environment, tmp_path) as address:
        check_over_http(address, simulated(kind))


@no_command
@pytest.mark.parametrize("kind", ["shared", "own"])
def test_text_and_counters_over_two_nodes(
    checkpoint: Callable[[str], Path],
    simulated: Callable[..., SimulatedChain],
    environment: dict[str, str],
    tmp_path: Path,
    kind: str,
) -> None:
    """vLLM's own launcher for several machines, both nodes on this one."""
    engine = engine_arguments("custom_class", checkpoint(kind), NUM_HEADS)
    with server(engine, environment, tmp_path, machines=2) as address:
        check_over_http(address, simulated(kind))
