"""Train extra decoding heads for a causal language model and generate faster with them.

The names below load on first use (PEP 562): `import medusa_heads` itself imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_heads.config import HeadsConfig
    from medusa_heads.heads import BlockHeads, Eagle3Heads, HydraHeads, MedusaHeads, new_heads
    from medusa_heads.inference.models.drafted import DraftedModel
    from medusa_heads.inference.models.hub_form import custom_generate
    from medusa_heads.inference.models.medusa import MedusaModel, attach
    from medusa_heads.inference.models.training_free import TrainingFreeModel
    from medusa_heads.target.target import TargetModel
    from medusa_heads.training.runs.draft import train_draft
    from medusa_heads.training.runs.heads import train_heads

    __version__: str

__all__ = [
    "BlockHeads",
    "DraftedModel",
    "Eagle3Heads",
    "HeadsConfig",
    "HydraHeads",
    "MedusaHeads",
    "MedusaModel",
    "TargetModel",
    "TrainingFreeModel",
    "__version__",
    "attach",
    "custom_generate",
    "new_heads",
    "train_draft",
    "train_heads",
]

_HOMES = {
    "BlockHeads": "medusa_heads.heads",
    "DraftedModel": "medusa_heads.inference.models.drafted",
    "Eagle3Heads": "medusa_heads.heads",
    "HeadsConfig": "medusa_heads.config",
    "HydraHeads": "medusa_heads.heads",
    "MedusaHeads": "medusa_heads.heads",
    "MedusaModel": "medusa_heads.inference.models.medusa",
    "TargetModel": "medusa_heads.target.target",
    "TrainingFreeModel": "medusa_heads.inference.models.training_free",
    "attach": "medusa_heads.inference.models.medusa",
    "custom_generate": "medusa_heads.inference.models.hub_form",
    "new_heads": "medusa_heads.heads",
    "train_draft": "medusa_heads.training.runs.draft",
    "train_heads": "medusa_heads.training.runs.heads",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("medusa-heads")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # found once, then an ordinary attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
