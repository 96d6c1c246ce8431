"""The flags and YAML keys of joint training. Light: nothing here imports torch or transformers."""

from dataclasses import dataclass, field, fields

from medusa_heads.training.arguments.joint_config import ALL_LINEAR, JointConfig


@dataclass
class JointArguments:
    """A LoRA adapter in the target, trained together with the heads (Medusa-2)."""

    joint: bool = field(
        default=False,
        metadata={
            "help": "Train an adapter of the target together with the heads. It becomes another "
            "model: heads and adapter are saved, and loaded, together."
        },
    )
    joint_warmup_steps: float = field(
        default=0.2,
        metadata={
            "help": "Steps in which the heads learn alone; a number below 1 is a share of the run."
        },
    )
    lora_r: int = field(default=32, metadata={"help": "Rank of the adapter."})
    lora_alpha: float = field(
        default=16.0,
        metadata={"help": "Scale of the adapter: its output is multiplied by lora_alpha / lora_r."},
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapter."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: [ALL_LINEAR],
        metadata={
            "help": "Linear modules that get an adapter, by the ends of their names; all-linear: "
            "all but the lm_head."
        },
    )
    lora_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Peak learning rate of the adapter. Default: a quarter of the heads'."},
    )
    joint_lm_weight: float = field(
        default=1.0,
        metadata={
            "help": "Weight of the target's own cross-entropy in the loss. Set 0 on its own text."
        },
    )
    joint_kl_weight: float = field(
        default=1.0,
        metadata={
            "help": "Weight of the KL divergence from the target without adapter in the loss."
        },
    )
    joint_heads_weight: float = field(
        default=0.2, metadata={"help": "Weight of the heads' loss in the loss."}
    )

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> JointConfig | None:
        """The same as a JointConfig; None where heads are trained alone.

        Raises:
            ValueError: a value out of its range, or one that plays no part without `joint`.
        """
        if not self.joint:
            idle = [f.name for f in fields(self) if getattr(self, f.name) != _default(f.name)]
            if idle:
                raise ValueError(f"{idle[0]} plays a part in joint training only: add --joint")
            return None
        modules = self.lora_target_modules
        return JointConfig(
            lora_r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=ALL_LINEAR if modules == [ALL_LINEAR] else tuple(modules),
            warmup_steps=self.joint_warmup_steps,
            learning_rate=self.lora_learning_rate,
            lm_weight=self.joint_lm_weight,
            kl_weight=self.joint_kl_weight,
            heads_weight=self.joint_heads_weight,
        )


def _default(name: str) -> object:
    found = JointArguments.__dataclass_fields__[name]
    return [ALL_LINEAR] if name == "lora_target_modules" else found.default
