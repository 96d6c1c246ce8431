"""What commands tell torch before it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_heads.cli.flags.arguments import run_command
from medusa_heads.cli.flags.environment import told_to_torch

_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
_TOLD = {"THP_MEM_ALLOC_ENABLE": "1", **_WAITING}
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("variable", _TOLD)
def test_a_variable_is_set_unless_the_user_has(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    for name in _TOLD:
        monkeypatch.delenv(name, raising=False)
    run_command(lambda: seen.append(os.environ.get(variable)))
    for name in _TOLD:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "ours")
    run_command(lambda: seen.append(os.environ.get(variable)))
    assert seen == [_TOLD[variable], "ours"]


def test_threads_of_a_user_who_says_how_they_wait_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert not _WAITING.keys() & told_to_torch().keys()


@pytest.mark.slow
@pytest.mark.skipif(
    not _HUGE_PAGES.is_file() or "[madvise]" not in _HUGE_PAGES.read_text(),
    reason="this system gives nobody huge pages, or everybody",
)
def test_torch_puts_large_tensors_into_huge_pages() -> None:
    program = (
        "from medusa_heads.cli.flags.arguments import run_command\n"
        "def main():\n"
        "    import torch\n"
        "    kept = torch.ones(64 << 18)\n"
        "    lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "    print(next(l.split()[1] for l in lines if l.startswith('AnonHugePages')))\n"
        "run_command(main)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in _TOLD}
    huge = [
        int(
            subprocess.run(
                [sys.executable, "-c", program],
                env={**environment, **told},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for told in ({}, {"THP_MEM_ALLOC_ENABLE": "0"})
    ]
    assert huge[0] - huge[1] > 40 << 10, f"kB in huge pages, as told and without: {huge}"
