"""The same through vLLM's OpenAI server over HTTP: texts from its API, counters from /metrics."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from medusa_heads.inference.serving.chain import SimulatedChain
from tests.vllm.conftest import counters, engine_arguments, has_medusa
from tests.vllm.partly_trained import NEW_TOKENS, NUM_HEADS, prompts

STARTING_SECONDS = 240


@contextmanager
def server(engine: dict[str, Any], environment: dict[str, str], log: Path) -> Iterator[str]:
    """An OpenAI server with these arguments; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "demo"]
    for name, value in engine.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            command.append(flag)
        else:
            command += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            wait(address, process, log)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=60)


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
    with server(engine, environment, tmp_path / "server.log") as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        answer = client.completions.create(
            model="demo",
            prompt=prompts(),
            max_tokens=NEW_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        counted = read_counters(address)
    texts: list[Any] = [choice.token_ids for choice in answer.choices]
    assert texts == simulated(kind).texts
    assert counted == counters(simulated(kind))
