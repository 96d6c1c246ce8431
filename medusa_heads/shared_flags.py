"""Flags of several commands: each is named and explained here, once."""

from dataclasses import dataclass
from typing import Literal

from medusa_heads.settings import flag


@dataclass(kw_only=True)
class DeviceFlag:
    """Where to compute."""

    device: str | None = flag(None, "Device, such as cpu or cuda. Default: the best there is.")


@dataclass(kw_only=True)
class RemoteCodeFlag:
    """Whose code may run."""

    trust_remote_code: bool = flag(False, "Run the Python code that comes with the target.")


@dataclass(kw_only=True)
class LoadingFlags(DeviceFlag, RemoteCodeFlag):
    """How a target is loaded."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "Dtype of the target; auto: the fastest here that holds it exactly."
    )


@dataclass(kw_only=True)
class TextFlags:
    """Which part of a corpus is read."""

    dataset_config: str | None = flag(None, "Configuration (subset) of a hub dataset.")
    text_column: str | None = flag(None, "Column that holds plain text, if not 'text'.")


@dataclass(kw_only=True)
class BadRowFlag:
    """What becomes of rows of a corpus that cannot be used."""

    on_bad_row: Literal["error", "skip"] = flag("error", "Stop at broken rows, or count and skip.")


@dataclass(kw_only=True)
class MatrixFlag:
    """Whether the target's vocabulary matrix lies beside its heads."""

    with_vocab_matrix: bool = flag(
        False,
        "Have a copy of the target's vocabulary matrix beside heads that share it, for vLLM 0.32. "
        "It is under the target's licence; push takes the copy that is there.",
    )
