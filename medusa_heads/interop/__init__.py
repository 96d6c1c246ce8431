"""Heads as other projects store them: read from their layouts, written to them.

`formats.py` holds the layouts as tables; `convert.py` and `export.py` are what users call. The
names stand here, so that a command line knows them without loading torch.
"""

from __future__ import annotations

from typing import Literal

ReadFormat = Literal[
    "fasterdecoding",
    "tgi",
    "lorax",
    "merged",
    "vllm",
    "modelopt",
    "hydra",
    "eagle3",
    "dflash",
    "dspark",
]
WrittenFormat = Literal[
    "fasterdecoding",
    "tgi",
    "lorax",
    "vllm",
    "modelopt",
    "eagle3",
    "eagle3-speculators",
    "dflash",
    "dspark",
    "gguf",  # a drafter for llama.cpp
    "transformers",  # of heads an assistant; of trained modules their target with them in it
]
