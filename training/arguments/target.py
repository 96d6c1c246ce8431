"""The flags and YAML keys of the target. Light: nothing here imports torch or transformers."""

from dataclasses import MISSING, dataclass
from typing import Any

from medusa_heads.files import expanded
from medusa_heads.settings import flag, one_of
from medusa_heads.shared_flags import RemoteCodeFlag


@dataclass
class TargetArguments(RemoteCodeFlag):
    """Which model the heads are for."""

    model_name_or_path: str = flag(MISSING, "The target: a hub id or a folder. It is not changed.")
    model_revision: str | None = flag(None, "Branch, tag or commit on the hub. Default: main.")
    dtype: str = flag(
        "auto",
        "Dtype of the target's weights: bfloat16, float16, float32, or auto: the fastest on this "
        "machine that holds them exactly (in several processes: as stored).",
    )
    load_in_4bit: bool = flag(False, "Keep all matrices but the lm_head in 4 bits (bitsandbytes).")
    shard_target: bool = flag(False, "Spread one target over all processes (FSDP2).")

    def __post_init__(self) -> None:
        if self.model_revision is not None and expanded(self.model_name_or_path).is_dir():
            raise ValueError(
                f"model_revision is of a model on the hub, and {self.model_name_or_path!r} is a "
                "folder: leave it out"
            )
        one_of(self, "dtype", ("auto", "bfloat16", "float16", "float32"))
        if self.shard_target and self.load_in_4bit:
            raise ValueError(
                "shard_target and load_in_4bit exclude each other: 4-bit matrices cannot be spread"
            )

    def source(self) -> dict[str, Any]:
        """What every `from_pretrained` of the target is told besides its name."""
        revision = {} if self.model_revision is None else {"revision": self.model_revision}
        return {"trust_remote_code": self.trust_remote_code, **revision}

    def placement(self, device: Any) -> dict[str, Any]:
        """What TargetModel.from_pretrained is told of the device and of quantisation: NormalFloat
        with quantised constants, computing in bf16 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).
        """
        if not self.load_in_4bit:
            return {"device": device}
        import torch
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32 if self.dtype == "float32" else torch.bfloat16,
        )
        return {"quantization_config": config, "device_map": {"": device}}
