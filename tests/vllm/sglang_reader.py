"""What SGLang's own EAGLE-3 class has read of a folder: a program, since it changes transformers.

    python tests/vllm/sglang_reader.py FOLDER OUT

Its parameters are written to OUT, and what it says of the tokens that are drafted; not a number is
what no weight was found for. What it imports for pictures and CUDA kernels is not there on a CPU,
and never called while weights are loaded.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

NEVER_CALLED = [name for name in ("torchvision", "sgl_kernel", "gguf") if find_spec(name) is None]
RANKS = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "moe_ep_rank")


class Absent(ModuleType):
    """A module of which anything may be imported, and nothing used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Finder(MetaPathFinder, Loader):
    """Finds what is not there."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        known = fullname.partition(".")[0] in NEVER_CALLED
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def main(folder: Path, out: Path) -> None:
    """Read, and write what was read."""
    sys.meta_path.insert(0, Finder())
    models: Any = importlib.import_module("sglang.srt.models.llama_eagle3")
    context: Any = importlib.import_module("sglang.srt.runtime_context")
    groups: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    context.get_context().override_server_args(device="cpu").install()
    groups.init_distributed_environment(1, 0, f"file://{out}.rendezvous", 0, "gloo")
    groups.initialize_model_parallel(backend="gloo")
    with context.get_parallel().override(**dict.fromkeys(RANKS, 0)), torch.no_grad():
        model = models.LlamaForCausalLMEagle3(AutoConfig.from_pretrained(folder))
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.load_weights(load_file(folder / "model.safetensors").items())
    held = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    hot = model.get_hot_token_id()
    save_file(held if hot is None else held | {"hot_token_id": hot}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
