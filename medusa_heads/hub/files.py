"""Which files of a checkpoint folder go to a hub, and come from one.

By exact names: nothing else of a training run is ever pushed, and nothing else of a stranger's
repository is ever downloaded.
"""

from __future__ import annotations

from medusa_heads.checkpoint.adapter import ADAPTER_FOLDER, ADAPTER_WEIGHTS
from medusa_heads.checkpoint.adapter_config import ADAPTER_CONFIG
from medusa_heads.checkpoint.custom_generate import CUSTOM_GENERATE
from medusa_heads.checkpoint.stored_heads import CONFIG_FILE, SIDECAR_FILE, WEIGHTS_FILE
from medusa_heads.checkpoint.vocab_matrix import VOCAB_MATRIX_FILE

CARD_FILE = "README.md"
REPORT_FILE = "report.json"
BENCHMARK_FILE = "benchmark.json"
BENCHMARK_PICTURE = "benchmark.png"
PICTURES = ("tokens_per_step.png", "accuracy.png", "reliability.png", BENCHMARK_PICTURE)

ADAPTER_FILES = tuple(f"{ADAPTER_FOLDER}/{name}" for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
LOADED_FILES = (SIDECAR_FILE, WEIGHTS_FILE, *ADAPTER_FILES)
"""What loading heads reads."""

REPORT_FILES = (REPORT_FILE, "report.md", BENCHMARK_FILE, *PICTURES)
"""What was measured of them."""

KEPT_FILES = (*LOADED_FILES, CONFIG_FILE, VOCAB_MATRIX_FILE, CARD_FILE, *REPORT_FILES)
"""What is taken as it lies in a folder or a repository. The files of `custom_generate/`, which are
programs, are not: they are written anew."""

OWN_FILES = (*KEPT_FILES, *CUSTOM_GENERATE)
"""All that a checkpoint is."""
