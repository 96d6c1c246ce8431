"""Heads on their way to another engine: the files that it reads.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from medusa_heads.checkpoint.files import CONFIG_FILE, WEIGHTS_FILE, write_json
from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS, StoredHeads
from medusa_heads.checkpoint.tensor_file import write_tensors
from medusa_heads.interop import ReadFormat, WrittenFormat, block, eagle3, gguf_file
from medusa_heads.interop.fits import ENGINES, HANDED_ON, KINDS
from medusa_heads.interop.formats import FORMATS, without_heads
from medusa_heads.interop.gguf_target import TargetFile
from medusa_heads.interop.source import open_source
from medusa_heads.interop.target_files import write_model

_VLLM_NAMES = {
    r"(\d+)\.(\d+)\.linear\.(weight|bias)": r"blocks.\1.layers.\2.\3",
    r"(\d+)\.\d+\.weight": r"lm_heads.\1.weight",
    DRAFT_TOKENS: "token_map",
}

_Written = tuple[str, dict[str, Tensor], dict[str, Any]]
"""The weights' file, what it holds, and what config.json says beside the sizes."""


@dataclass
class Outgoing:
    """Heads to be written for an engine, and what the user should know of that. `matrix_VD` gives
    the target's vocabulary matrix and `embeddings_VD` its token embeddings, or they say where to
    get them; in `place` the files will lie, which are written elsewhere first. `target_file` is
    what llama.cpp reads the target from."""

    stored: StoredHeads
    place: str
    matrix_VD: Callable[[], Tensor]
    embeddings_VD: Callable[[], Tensor]
    notices: list[str] = field(default_factory=list)
    target_file: TargetFile | None = None

    def __post_init__(self) -> None:
        self.config = self.stored.config
        self.shared = self.config.vocab_matrix == "shared"

    def with_own_matrices(self) -> dict[str, Tensor]:
        """The heads' tensors, each head with a vocabulary matrix: a copy of what they share."""
        tensors = dict(self.stored.tensors)
        if self.shared:
            matrix_VD = self.matrix_VD()
            for i in range(self.config.num_heads):
                tensors[f"{i}.{self.config.num_layers}.weight"] = matrix_VD.clone()
        return tensors

    def over_full_vocabulary(self) -> Outgoing:
        """Heads that draft every token of the target's: those they were not trained to draft, too.
        Raises ValueError: they have matrices of their own, or a correction, without rows for other
        tokens."""
        if self.config.draft_vocab_size is None:
            return self
        if self.config.correction_rank is not None:
            raise ValueError(
                "a correction by the token before has no rows for tokens that the heads cannot "
                "draft: leave full_vocabulary out, or train with draft_vocab_size all"
            )
        if not self.shared:
            raise ValueError(
                "heads with a reduced vocabulary and matrices of their own have no rows for other "
                "tokens: train them with draft_vocab_size all"
            )
        tensors = {name: t for name, t in self.stored.tensors.items() if name != DRAFT_TOKENS}
        stored = replace(
            self.stored, config=replace(self.config, draft_vocab_size=None), tensors=tensors
        )
        notice = (
            f"the heads learnt to draft {self.config.draft_vocab_size} tokens and now draft all "
            f"{self.config.vocab_size}: other drafts, never other text"
        )
        return replace(self, stored=stored, notices=[*self.notices, notice])

    def write(self, folder: Path, to: WrittenFormat) -> None:
        """Write what the engine reads. Raises ValueError: the target's files or its vocabulary
        matrix are not at hand; OSError: the folder cannot be written."""
        if to == "modelopt":
            self._write_whole_model(folder)
            return
        if self.target_file is not None:
            self._write_gguf(folder, self.target_file)
            return
        if to in KINDS:
            self._write_layers(folder, to)
            return
        file, tensors, config = self._of_vllm() if to == "vllm" else self._of_fasterdecoding(to)
        if file.endswith(".safetensors"):
            write_tensors(folder / file, tensors)
        else:
            torch.save(tensors, folder / file)
        base_model = self.stored.target.get("name_or_path")
        keys = FORMATS[cast(ReadFormat, to)].keys
        sizes = {key: getattr(self.config, ours) for ours, key in keys.items()}
        write_json(folder / CONFIG_FILE, {"base_model_name_or_path": base_model, **sizes, **config})

    def _write_layers(self, folder: Path, to: WrittenFormat) -> None:
        """Decoder layers, with their rows of the target's vocabulary matrix where they share that;
        of a block's whole one engines read the target's own."""
        copied = self.config.kind == "eagle3" or self.config.draft_vocab_size is not None
        matrix_VD = self.matrix_VD() if self.shared and copied else None
        if self.config.kind == "block":
            tensors, config = (
                block.assistant(self.stored)
                if to == "transformers"
                else block.written(self.stored, matrix_VD)
            )
        else:
            plain = to == "eagle3"
            tensors, config = eagle3.written(self.stored, matrix_VD, speculators=not plain)
            if not plain:  # speculators' own class does without them by chance alone
                embedded_VD = self.embeddings_VD().to(tensors["norm.weight"].dtype)
                tensors["embed_tokens.weight"] = embedded_VD
        write_tensors(folder / "model.safetensors", tensors)
        base_model = self.stored.target.get("name_or_path")
        write_json(folder / CONFIG_FILE, {"base_model_name_or_path": base_model, **config})
        if to == "eagle3" and (why := eagle3.misread_by_sglang(self.stored)):
            self.notices.append(
                f"SGLang 0.5 drafts badly with these heads, and does not say so: {why}"
            )
        if to == "transformers":
            self.notices.append(
                "draft with it: target.generate(.., speculation_type='dflash', assistant_model="
                f"AutoModel.from_pretrained({self.place!r})), one text at a time"
            )
            return
        said: dict[str, Any] = {"method": to.removesuffix("-speculators"), "model": self.place}
        said["num_speculative_tokens"] = self.config.num_heads
        flag = shlex.quote(json.dumps(said, ensure_ascii=False))
        self.notices.append(f"serve it with vLLM: --speculative-config {flag}")

    def _write_gguf(self, folder: Path, target: TargetFile) -> None:
        file, way = gguf_file.write(folder, self.stored, self.matrix_VD, target)
        place = shlex.quote(str(Path(self.place) / file.name))
        if not target.is_known(self.stored):
            why = (
                "nothing more is known of that of the heads"
                if target.lm_head_sha256
                else "it does not hold its vocabulary matrix as it was trained"
            )
            self.notices.append(
                f"that the GGUF file is the heads' target is known by its sizes alone: {why}"
            )
        if target.architecture not in HANDED_ON:
            self.notices.append(
                f"llama.cpp of October 2026 hands drafters no layers of {target.architecture} "
                "models, and its server aborts with this file; a later one may"
            )
        self.notices.append(
            f"serve it with llama.cpp: llama-server -m TARGET.gguf -md {place} --spec-type {way} "
            f"--spec-draft-n-max {self.config.num_heads}"
        )

    def _of_fasterdecoding(self, to: WrittenFormat) -> _Written:
        """v0.1 in the pickled file that its own code reads, heads that share a matrix as v2; for
        TGI and LoRAX in the one file that these read."""
        tensors, shared = self.stored.tensors, self.shared
        if to != "fasterdecoding" and shared and self.config.num_layers > 1:
            # Both read several blocks only of heads that have matrices: copies make the same heads.
            tensors, shared = self.with_own_matrices(), False
            self.notices.append(
                f"{ENGINES[to]} shares the target's vocabulary matrix among heads of one block "
                "only: each head is given a copy"
            )
        # No `architectures`, by which TGI tells other models; LoRAX goes by the version.
        version = {"version": "2"} if shared else {"version": "1"} if to == "lorax" else {}
        pickled = to == "fasterdecoding" and not shared
        return "medusa_lm_head.pt" if pickled else WEIGHTS_FILE, tensors, version

    def _of_vllm(self) -> _Written:
        """With every key that vLLM reads, so that none of its defaults plays a part."""
        tensors = {}
        for name, tensor in self.stored.tensors.items():
            found = ((re.fullmatch(ours, name), theirs) for ours, theirs in _VLLM_NAMES.items())
            tensors[next(match.expand(theirs) for match, theirs in found if match)] = tensor
        if self.shared:
            matrix_VD = self.matrix_VD()
            drafted = tensors.get("token_map")
            tensors["lm_head.weight"] = matrix_VD if drafted is None else matrix_VD[drafted]
            if drafted is not None:
                self.notices.append(
                    "vLLM reads a token_map only with model_loader_extra_config="
                    '{"enable_weights_track": False}; --full_vocabulary does without'
                )
        # No other key with "num" and "heads" or "layers" in it: vLLM would take it for these two.
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_fc_bias": True,
            "original_lm_head": self.shared,
            "truncated_vocab_size": self.config.num_candidates,
        }
        return "model.safetensors", tensors, config

    def _write_whole_model(self, folder: Path) -> None:
        """The target and the heads as one model, as ModelOpt has it."""
        target, prefix = self.stored.target, FORMATS["modelopt"].prefix
        heads = {prefix + name: tensor for name, tensor in self.with_own_matrices().items()}
        if self.shared:
            self.notices.append("each head is given a copy of the target's vocabulary matrix")
        name = target.get("name_or_path")
        if not name:
            raise ValueError(
                "the layout holds the target too, and the heads name none: give the target"
            )
        source = open_source(str(name), revision=target.get("revision"), model=True)
        said = {"medusa": {"num_medusa_heads": self.config.num_heads, "num_medusa_layers": 1}}
        names, config = without_heads(source)
        write_model(folder, source, names, config | said, heads)
