"""The flags and YAML keys of the target. Light: nothing here imports torch or transformers."""

from dataclasses import MISSING, dataclass
from typing import Any

from medusa_heads.files import at_home, expanded
from medusa_heads.settings import flag, mapping, one_of
from medusa_heads.shared_flags import RemoteCodeFlag

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


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
    attn_implementation: str | None = flag(
        None,
        "Attention of the target by transformers' names: sdpa, eager, flash_attention_2, ... "
        "Default: transformers' choice.",
    )
    device_map: dict | str | None = flag(
        None,
        "Lay one target over the devices of one process: auto, balanced, balanced_low_0 or "
        "sequential, or a mapping of its modules to devices, cpu and disk (YAML or JSON). Heads "
        "lie on the first device, and the lm_head and token embeddings beside them.",
    )
    shard_target: bool = flag(False, "Spread one target over all processes (FSDP2).")
    tensor_parallel: bool = flag(
        False,
        "Cut each of the target's matrices into a part for each process (transformers' tp_plan).",
    )

    def __post_init__(self) -> None:
        self.model_name_or_path = at_home(self.model_name_or_path)
        if self.model_revision is not None and expanded(self.model_name_or_path).is_dir():
            raise ValueError(
                f"model_revision is of a model on the hub, and {self.model_name_or_path!r} is a "
                "folder: leave it out"
            )
        one_of(self, "dtype", ("auto", "bfloat16", "float16", "float32"))
        apart = self.apart
        if len(apart) > 1:
            raise ValueError(
                f"{apart[0]} and {apart[1]} exclude each other: a target is laid over devices, "
                "spread by layers or cut into parts"
            )
        if self.load_in_4bit and apart and apart != ["device_map"]:
            raise ValueError(
                f"{apart[0]} and load_in_4bit exclude each other: 4-bit matrices cannot be spread"
            )
        given = self.device_map
        if isinstance(given, str) and not given.lstrip().startswith("{"):
            one_of(self, "device_map", _MAPS)
        elif given is not None:
            self.device_map = mapping(self, "device_map")

    @property
    def apart(self) -> list[str]:
        """The flags by which the target is not whole on one device."""
        told = {
            "device_map": self.device_map is not None,
            "shard_target": self.shard_target,
            "tensor_parallel": self.tensor_parallel,
        }
        return [name for name, is_set in told.items() if is_set]

    def source(self) -> dict[str, Any]:
        """What every `from_pretrained` of a configuration is told besides its name."""
        revision = {} if self.model_revision is None else {"revision": self.model_revision}
        return {"trust_remote_code": self.trust_remote_code, **revision}

    def attention(self) -> dict[str, Any]:
        """What every `from_pretrained` of the target is told of its attention."""
        given = self.attn_implementation
        return {} if given is None else {"attn_implementation": given}

    def placement(self, device: Any, *, at_once: bool = False) -> dict[str, Any]:
        """What TargetModel.from_pretrained is told of devices, by default this one, whose weights
        may come there `at_once`, not through the host's memory; and of quantisation: NormalFloat
        with quantised constants, computing in bf16 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).
        """
        where = {"device_map": {"": device} if self.device_map is None else self.device_map}
        if not self.load_in_4bit:
            return where if at_once or self.device_map is not None else {"device": device}
        import torch
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32 if self.dtype == "float32" else torch.bfloat16,
        )
        return {"quantization_config": config, **where}
