"""A target as llama.cpp reads it: a GGUF file, whose vocabulary a drafter's file takes over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from medusa_heads.checkpoint.stored_heads import StoredHeads
from medusa_heads.errors import first_line
from medusa_heads.files import expanded
from medusa_heads.target.fingerprint import lm_head_sha256

_TOKENS = "tokenizer.ggml.tokens"
_EXACT = ("F32", "BF16")  # types of a vocabulary matrix that is known by its hash


@dataclass(frozen=True)
class TargetFile:
    """What a drafter's file takes over from that of its target: a GGUF file, quantised or not."""

    architecture: str  # what llama.cpp calls the target's
    # The tokenizer's keys, each with its value and the value's types.
    vocabulary: Mapping[str, tuple[Any, list[Any]]]
    num_layers: int  # of the target, without modules that predict later tokens
    hidden_size: int
    vocab_size: int
    # See fingerprint.py; None where the matrix is not there as it was trained: quantised, or
    # padded, or in another file.
    lm_head_sha256: str | None

    @classmethod
    def read(cls, path: str) -> TargetFile:
        """Raises ValueError: there is no such file, it is no GGUF file, or holds no language model;
        or the library that reads it is not installed."""
        gguf, file = library(), expanded(path)
        if not file.is_file():
            raise ValueError(f"expected the target's GGUF file at {path!r}, found none")
        try:
            reader = gguf.GGUFReader(file)
            said = {name: field.contents() for name, field in reader.fields.items()}
            kind = said["general.architecture"]
            layers, hidden_size = said[f"{kind}.block_count"], said[f"{kind}.embedding_length"]
            layers -= said.get(f"{kind}.nextn_predict_layers", 0)  # which are counted with them
            tokens = said[_TOKENS]
        # Whatever it is that a damaged file makes the library stumble over.
        except Exception as error:
            why = first_line(error) or type(error).__name__
            raise ValueError(f"{path!r} is no GGUF file of a language model ({why})") from error
        vocabulary = {
            name: (said[name], field.types)
            for name, field in reader.fields.items()
            if name.startswith("tokenizer.") and said[name] != []  # which the library writes not
        }
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        matrix = tensors.get("output.weight")
        if matrix is None and said.get("split.count", 0) <= 1:  # else it may be in another file
            matrix = tensors.get("token_embd.weight")
        whole = matrix is not None and len(matrix.data) == len(tokens)  # some files pad it
        known = _sha256(matrix) if whole else None
        return cls(kind, vocabulary, layers, hidden_size, len(tokens), known)

    def is_known(self, stored: StoredHeads) -> bool:
        """Whether more than sizes was compared with the target of these heads."""
        return None not in (self.lm_head_sha256, stored.target.get("lm_head_sha256"))

    def check(self, stored: StoredHeads) -> None:
        """Raises ValueError: it is no target of these heads."""
        config, known = stored.config, stored.target.get("lm_head_sha256")
        for what, theirs, ours in (
            ("a hidden size", self.hidden_size, config.hidden_size),
            ("a vocabulary", self.vocab_size, config.vocab_size),
        ):
            if theirs != ours:
                raise ValueError(
                    f"the heads belong to a target with {what} of {ours}, and that of the GGUF "
                    f"file is {theirs}"
                )
        last, most = max(config.features or [0]), self.num_layers - 1
        if last > most:
            raise ValueError(
                f"the heads read layer {last} of their target, and that of the GGUF file has "
                f"{self.num_layers}"
            )
        if last == most:  # what it hands on of some architectures is not written to by any layer
            raise ValueError(
                f"llama.cpp hands drafters no output of the target's last layer ({last}): train "
                "with features of other layers"
            )
        if self.is_known(stored) and self.lm_head_sha256 != known:
            raise ValueError(
                "the heads belong to another target: the vocabulary matrix of the GGUF file is not "
                "theirs"
            )


def library() -> Any:
    """That of llama.cpp for its files. Raises ValueError: it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            "GGUF files are read and written by a library that is not installed: pip install gguf"
        ) from error
    return gguf


def _sha256(matrix: Any) -> str | None:
    if matrix.tensor_type.name not in _EXACT:
        return None
    raw = torch.from_numpy(np.array(matrix.data))  # torch wants what it could write to
    return lm_head_sha256(raw.view(torch.bfloat16) if raw.dtype == torch.uint8 else raw)
