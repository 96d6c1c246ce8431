"""Which files of a checkpoint folder go to a hub, and come from one.

By exact names: nothing else of a training run is ever pushed, and nothing else of a stranger's
repository is ever downloaded.
"""

from __future__ import annotations

from medusa_heads.adapter import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS
from medusa_heads.custom_generate import GENERATE_FILE, REQUIREMENTS_FILE
from medusa_heads.stored_heads import CONFIG_FILE, SIDECAR_FILE, VOCAB_MATRIX_FILE, WEIGHTS_FILE

CARD_FILE = "README.md"
REPORT_FILE = "report.json"
BENCHMARK_FILE = "benchmark.json"
BENCHMARK_PICTURE = "benchmark.png"
PICTURES = ("tokens_per_step.png", "accuracy.png", "reliability.png", BENCHMARK_PICTURE)

_OF_ADAPTER = tuple(f"{ADAPTER_FOLDER}/{name}" for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
LOADED_FILES = (SIDECAR_FILE, WEIGHTS_FILE, *_OF_ADAPTER)
"""What loading heads reads."""

REPORT_FILES = (REPORT_FILE, "report.md", BENCHMARK_FILE, *PICTURES)
"""What was measured of them."""

OWN_FILES = (
    *LOADED_FILES,
    CONFIG_FILE,
    VOCAB_MATRIX_FILE,
    GENERATE_FILE,
    REQUIREMENTS_FILE,
    CARD_FILE,
    *REPORT_FILES,
)
"""All that a checkpoint is."""
