"""Train extra decoding heads for a causal language model and generate faster with them.

The names below load on first use (PEP 562): `import medusa_heads` itself imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_heads.config import HeadsConfig
    from medusa_heads.heads import HydraHeads, MedusaHeads, new_heads
    from medusa_heads.inference.draft_model import DraftedModel
    from medusa_heads.inference.model import MedusaModel, attach
    from medusa_heads.inference.training_free import TrainingFreeModel
    from medusa_heads.target import TargetModel
    from medusa_heads.training.train import train_heads
    from medusa_heads.training.train_draft import train_draft

    __version__: str

__all__ = [
    "DraftedModel",
    "HeadsConfig",
    "HydraHeads",
    "MedusaHeads",
    "MedusaModel",
    "TargetModel",
    "TrainingFreeModel",
    "__version__",
    "attach",
    "new_heads",
    "train_draft",
    "train_heads",
]

_HOMES = {
    "DraftedModel": "medusa_heads.inference.draft_model",
    "HeadsConfig": "medusa_heads.config",
    "HydraHeads": "medusa_heads.heads",
    "MedusaHeads": "medusa_heads.heads",
    "MedusaModel": "medusa_heads.inference.model",
    "TargetModel": "medusa_heads.target",
    "TrainingFreeModel": "medusa_heads.inference.training_free",
    "attach": "medusa_heads.inference.model",
    "new_heads": "medusa_heads.heads",
    "train_draft": "medusa_heads.training.train_draft",
    "train_heads": "medusa_heads.training.train",
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
