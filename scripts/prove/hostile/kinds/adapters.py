"""peft adapters, and whole folders of strangers: code, links, names that lead elsewhere."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from medusa_heads.checkpoint.adapter import load_adapter, save_adapter
from medusa_heads.checkpoint.files import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS
from scripts.prove.hostile.attempt import Attempt
from scripts.prove.hostile.commands import read_by
from scripts.prove.hostile.kinds.sidecars import NO_JSON
from scripts.prove.hostile.kinds.tensor_files import broken_header, no_safetensors
from scripts.prove.hostile.values import change_one, deep, draw, many_digits, words
from scripts.prove.hostile.workshop import Place, Workshop

PATTERN = "(a+)+$"
CODE = "import pathlib\npathlib.Path({marker!r}).touch()\n"
ASKING: dict[str, list[Any]] = {
    "auto_mapping": [{"base_model_class": "X", "parent_library": "os"}, {"parent_library": "evil"}],
    "peft_type": ["XLORA", "PREFIX_TUNING", "", 5, ["LORA"], {"a": 1}, None, "lora", "__class__"],
    "task_type": ["SEQ_CLS", 5, "x", ["CAUSAL_LM"]],
    "bias": ["all", "lora_only", 5, True],
    "use_dora": [True, 1, "yes"],
    "modules_to_save": [["lm_head"], "lm_head", {"a": 1}],
    "init_lora_weights": ["pissa", "olora", "eva", "loftq", 5, ["gaussian"]],
    "loftq_config": [{"loftq_bits": 4}, 5],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"cache_file": "../x", "covariance_file": "/etc/passwd"}],
    "megatron_config": [{"a": 1}],
    "megatron_core": ["evil", "os", 5, "megatron.core.evil"],
    "layer_replication": [[[0, 2], [0, 2]], 5],
    "trainable_token_indices": [[1], {"embed_tokens": [1]}],
    "target_parameters": [["mlp.experts"], "x"],
    "target_modules": [PATTERN, [PATTERN], [["q_proj"]], 5, {"a": 1}, "q_proj", [], [5], ["../x"],
        ["none_such"]],
    "exclude_modules": [".*", [PATTERN], 5],
    "rank_pattern": [{PATTERN: 2}, {"q_proj": -1}, {"q_proj": "x"}, {"q_proj": 10**8}, 5, [1]],
    "alpha_pattern": [{PATTERN: 2}, {"q_proj": float("nan")}, {"q_proj": "x"}, 5],
    "layers_to_transform": ["0", [0.5], {"a": 1}, -1, [None]],
    "layers_pattern": [PATTERN, [PATTERN], 5],
    "r": [True, "2", -1, 2.5, 0, 10**8, None, [], float("nan")],
    "lora_alpha": [float("nan"), float("inf"), -1, "x", True, None, 10**12, []],
    "lora_dropout": [2, -1, float("nan"), "x", True],
    "fan_in_fan_out": ["x", 5, [1]],
    "use_rslora": ["x", 5],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "lora_bias": [True],
    "custom_module": ["evil.py"],
    "auto_map": [{"AutoModel": "evil.Model"}],
    "trust_remote_code": [True],
    "revision": [5, [1]],
    "base_model_name_or_path": [5, ["x"]],
    "__class__": ["os"],
    "\N{CYRILLIC SMALL LETTER TE}": [1],
}  # fmt: skip


class Adapters:
    """Put into a target; and folders of strangers, copied as `medusa-heads pull` copies them."""

    def __init__(self, workshop: Workshop) -> None:
        from peft import LoraConfig, get_peft_model

        self._workshop = workshop
        self._model = workshop.target.model
        self._good = workshop.root / "own" / "adapter"
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        adapted: Any = get_peft_model(copy.deepcopy(self._model), config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_B." in name:
                    parameter.fill_(0.1)
        save_adapter(self._good, adapted, "user/target", torch.float32)

    def draw(self, rng: random.Random, place: Place) -> Attempt:
        """One adapter, or one folder."""
        make = draw(
            rng,
            [
                (8, self._sound), (42, self._asking), (8, self._no_config), (8, self._fuzzed),
                (10, self._weights), (24, self._folder),
            ],
        )  # fmt: skip
        return make(rng, place)

    def _copy(self, place: Place) -> Path:
        folder = place.inputs / "lora"
        shutil.copytree(self._good, folder)
        (folder / "evil.py").write_text(CODE.format(marker=str(place.marker)))
        return folder

    def _load(self, folder: Path, into: list[Any]) -> Callable[[], int]:
        return read_by(lambda: load_adapter(copy.deepcopy(self._model), folder), into)

    def _sound(self, rng: random.Random, place: Place) -> Attempt:
        from medusa_heads.checkpoint.adapter import adapter_digest

        folder = self._copy(place)
        read: list[Any] = []
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        tensors = {
            name: torch.randn(value.shape, generator=generator)
            for name, value in load_file(folder / ADAPTER_WEIGHTS).items()
        }
        save_file(tensors, folder / ADAPTER_WEIGHTS)
        alpha = rng.randint(1, 64)
        self._change(folder, {"lora_alpha": alpha, "use_dora": False, "modules_to_save": None})

        def right() -> bool:
            layer = read[0].base_model.model.model.layers[0].self_attn.q_proj
            name = next(each for each in tensors if "q_proj.lora_A" in each)
            same = torch.equal(layer.lora_A["default"].weight, tensors[name])
            return (
                same
                and adapter_digest(read[0]) is not None
                and layer.scaling["default"] == alpha / 2
            )

        return Attempt("good", "good", self._load(folder, read), right=right)

    def _change(self, folder: Path, values: dict[str, Any]) -> None:
        file = folder / ADAPTER_CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    def _asking(self, rng: random.Random, place: Place) -> Attempt:
        folder = self._copy(place)
        key = rng.choice(sorted(ASKING))
        value = rng.choice(ASKING[key])
        if rng.random() < 0.1:
            key, value = words(rng, 1, 2), rng.choice([True, "x", 5, [1], {"a": 1}])
        self._change(folder, {key: value})
        return Attempt(f"asks for {key}", "bad", self._load(folder, []), (repr(key), "lora"))

    def _no_config(self, rng: random.Random, place: Place) -> Attempt:
        folder = self._copy(place)
        file = folder / ADAPTER_CONFIG
        case = rng.randrange(4)
        if case == 0:
            file.unlink()
        elif case == 1:
            file.unlink()
            os.mkfifo(file)
        else:
            file.write_bytes(
                rng.choice([*NO_JSON, deep(9000).encode(), many_digits(rng).encode(), b"{}"])
            )
        return Attempt(f"no configuration {case}", "bad", self._load(folder, []), (ADAPTER_CONFIG,))

    def _fuzzed(self, rng: random.Random, place: Place) -> Attempt:
        """A value changed at random: refused, or the adapter is put in with its own matrices."""
        folder = self._copy(place)
        read: list[Any] = []
        file = folder / ADAPTER_CONFIG
        file.write_text(json.dumps(change_one(json.loads(file.read_text()), rng)))
        tensors = load_file(folder / ADAPTER_WEIGHTS)

        def right() -> bool:
            from medusa_heads.checkpoint.adapter import _active_matrices

            put_in = [tensor for _, tensor, _ in _active_matrices(read[0])]
            return all(
                any(torch.equal(tensor, each) for each in tensors.values()) for tensor in put_in
            )

        return Attempt("a change at random", "either", self._load(folder, read), right=right)

    def _weights(self, rng: random.Random, place: Place) -> Attempt:
        folder = self._copy(place)
        path = folder / ADAPTER_WEIGHTS
        case = rng.randrange(4)
        if case == 0:
            label, data = broken_header(path, rng)
            path.write_bytes(data)
        elif case == 1:
            label = no_safetensors(path, rng, place.marker)
        elif case == 2:
            label, tensors = "matrices that do not fit", load_file(path)
            name = rng.choice(sorted(tensors))
            tensors[name] = torch.zeros(rng.choice([(3, 3), (2, 7), (1,), (2, 33)]))
            save_file(tensors, path)
        else:
            label, tensors = "a matrix of another part", load_file(path)
            extra = rng.choice(
                [
                    "base_model.model.lm_head.weight",
                    "x",
                    "../x",
                    "base_model.model.evil.lora_C.weight",
                ]
            )
            save_file(tensors | {extra: torch.zeros(4, 4)}, path)
        return Attempt(
            f"weights: {label}", "bad", self._load(folder, []), ("lora", ADAPTER_WEIGHTS)
        )

    def _folder(self, rng: random.Random, place: Place) -> Attempt:
        """A stranger's whole folder, as it would lie in a hub's cache."""
        from medusa_heads.checkpoint.files import OWN_FILES
        from medusa_heads.hub.pull import copy_checkpoint

        source = place.inputs / "heads"
        shutil.copytree(self._workshop.heads(vocab_matrix="shared"), source)
        done: list[Any] = []
        run = read_by(lambda: copy_checkpoint(source, place.out), done)
        code = CODE.format(marker=str(place.marker))
        name = rng.choice(
            [
                "medusa_heads.json",
                "config.json",
                "medusa_lm_head.safetensors",
                "README.md",
                "report.json",
            ]
        )
        path = source / name
        case = rng.choice(
            ["code", "a link out", "a link around", "a FIFO", "a folder", "adapter out", "huge"]
        )
        if case == "code":
            for file in (
                "custom_generate/generate.py",
                "modeling_evil.py",
                "__init__.py",
                "setup.py",
                "adapter/evil.py",
            ):
                (source / file).parent.mkdir(exist_ok=True)
                (source / file).write_text(code)
            (source / "custom_generate" / "requirements.txt").write_text("evil")
            (source / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "evil.M"}}))

            def right() -> bool:
                files = {str(p.relative_to(place.out)) for p in place.out.rglob("*") if p.is_file()}
                texts = [p.read_text() for p in place.out.rglob("*.py")]
                return files <= set(OWN_FILES) and not any("touch()" in text for text in texts)

            return Attempt("folder: code is left behind", "good", run, right=right)
        if path.exists() or path.is_symlink():
            path.unlink()
        if case == "a link out":
            path.symlink_to(place.outside / "secret.txt")
        elif case == "a link around":
            path.symlink_to(
                Path("..")
                / rng.choice(["none", "../../../../etc/passwd", "../../outside/secret.txt"])
            )
        elif case == "a FIFO":
            os.mkfifo(path)
        elif case == "a folder":
            path.mkdir()
        elif case == "adapter out":
            path.write_text("{}")
            (source / ADAPTER_FOLDER).mkdir()
            (source / ADAPTER_FOLDER / ADAPTER_CONFIG).symlink_to(place.outside / "secret.txt")
        else:
            path = source / "report.md"
            with path.open("wb") as report:
                report.truncate((64 << 20) + 1 + rng.randrange(99))
        return Attempt(f"folder: {case}", "bad", run, ("heads",))
