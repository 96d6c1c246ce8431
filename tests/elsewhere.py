"""What Triton makes for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys


def compiled_elsewhere(program: str) -> str:
    """What a program prints that compiles kernels, where nothing is interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    asked = [sys.executable, "-c", program]
    made = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "FP_FUSION" not in made.stderr  # Triton 3.9 warns of kernels without `FUSED`
    return made.stdout
