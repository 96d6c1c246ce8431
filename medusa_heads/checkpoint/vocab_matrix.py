"""A copy of the target's vocabulary matrix beside heads that share it.

vLLM 0.32 reads a checkpoint folder as it is if the copy lies there. Nothing else wants it, it can
be several times as large as the heads, and it is the target's: under the target's licence. So it is
only written where it is asked for.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from medusa_heads.checkpoint.tensor_file import read_tensors
from medusa_heads.config import HeadsConfig

VOCAB_MATRIX_FILE = "vocab_matrix.safetensors"
VOCAB_MATRIX_KEY = "lm_heads.0.weight"  # where vLLM looks for a matrix that all heads share


def check_takes_matrix(config: HeadsConfig, *, bias: bool = False) -> None:
    """Raises ValueError where no engine would read the copy: heads that it could not hold, or that
    have matrices of their own.

    Args:
        config: of the heads.
        bias: the target's lm_head has one.
    """
    if config.vocab_matrix != "shared" or not config.is_plain_medusa or bias:
        raise ValueError(
            "with_vocab_matrix is for heads of kind medusa that share the target's whole "
            "vocabulary matrix, one without a bias, and have no prefix layer; no engine reads it "
            "beside others: leave it out"
        )


def read_vocab_matrix(folder: str | os.PathLike[str], config: HeadsConfig) -> Tensor:
    """The copy [V, D] beside heads.

    Raises:
        ValueError: there is none, or what lies there is another matrix.
    """
    path = Path(folder) / VOCAB_MATRIX_FILE
    tensors = read_tensors(path)
    shape = (config.vocab_size, config.hidden_size)
    if set(tensors) != {VOCAB_MATRIX_KEY} or tensors[VOCAB_MATRIX_KEY].shape != shape:
        raise ValueError(
            f"{path} must hold {VOCAB_MATRIX_KEY} of shape {list(shape)} alone: copy the "
            "checkpoint anew"
        )
    return tensors[VOCAB_MATRIX_KEY]
