"""What commands tell torch before it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_heads.cli.flags.arguments import run_command

_TOLD = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize(("variable", "value"), _TOLD.items())
def test_a_variable_is_set_unless_the_user_has(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setenv(variable, "ours")
    run_command(lambda: seen.append(os.environ.get(variable)))
    monkeypatch.delenv(variable)
    run_command(lambda: seen.append(os.environ.get(variable)))
    assert seen == ["ours", value]


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
