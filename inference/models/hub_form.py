"""The hub form: a checkpoint folder or repository given to transformers' generate() by name.

    model.generate(**inputs, custom_generate="runs/demo/heads", trust_remote_code=True)
    model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True, revision="main")

transformers imports `custom_generate/generate.py` from there (every checkpoint folder has one) and
calls what this file defines. The decoding loop is the one behind MedusaModel.generate().
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa_heads.checkpoint.stored_heads import SIDECAR_FILE
from medusa_heads.hub.pull import find_checkpoint
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:  # heavy to import
    from transformers import PreTrainedModel
    from transformers.generation.utils import GenerateDecoderOnlyOutput

# Arguments of generate() that say where and how transformers finds the repository.
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_OPTIONS = ("tree", "acceptance", "acceptance_settings", "rng")


def custom_generate(
    model: PreTrainedModel, *, heads: str | os.PathLike[str] | None = None, **arguments: Any
) -> GenerateDecoderOnlyOutput | Tensor:
    """What transformers calls for `model.generate(custom_generate=FOLDER_OR_REPOSITORY)`.

    Args:
        model: the model whose generate() was called.
        heads: folder or repository of the heads; by default the one given as `custom_generate`.
        arguments: of generate() as the user gave them; `tree`, `acceptance`,
            `acceptance_settings` and `rng` are MedusaModel's, `revision`, `token` and their like
            are of the repository.

    Raises:
        ValueError: heads missing, damaged or another model's, or an option tree decoding cannot
            honour.
    """
    name = heads if heads is not None else _asked_for(model)
    where, options = (
        {key: arguments.pop(key) for key in keys if key in arguments}
        for keys in (_HUB_OPTIONS, _OPTIONS)
    )
    return attached(model, find_checkpoint(name, **where), **options).generate(**arguments)


def attached(model: PreTrainedModel, folder: str | os.PathLike[str], **options: Any) -> MedusaModel:
    """The model with a folder's heads; attached once, and kept as long as the model lives.

    Its `last_stats` tells of the latest call through the hub form. Heads that were trained anew in
    the same folder, or a model moved to another device or dtype or of another vocabulary, are
    attached anew. Raises ValueError: heads missing, damaged or another model's."""
    sidecar = Path(folder).resolve() / SIDECAR_FILE
    written = sidecar.stat().st_mtime_ns if sidecar.is_file() else 0
    # Heads may share these, which change where the model is resized. Their weights alone are no
    # sign of that: accelerate exchanges them whenever it moves them.
    ends: Any = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary = [(weakref.ref(end), end.weight.shape) for end in ends if end is not None]
    state = (written, options, model.device, model.dtype, vocabulary)
    kept = _attachments.setdefault(model, {})
    if str(sidecar) not in kept or kept[str(sidecar)][0] != state:
        medusa = MedusaModel.from_pretrained(folder, target=_HeldWeakly(model), **options)
        kept[str(sidecar)] = (state, medusa)
    return kept[str(sidecar)][1]


class _HeldWeakly(TargetModel):
    """A target that does not keep its model alive, as what is kept by model must not."""

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None, "the model is gone"
        return model

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)


_attachments: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, MedusaModel]]] = (
    weakref.WeakKeyDictionary()
)


def _asked_for(model: PreTrainedModel) -> str:
    """What the user gave as `custom_generate`. transformers keeps it from the function it loads,
    and imports a copy of the file, so it is read off the generate() that is calling us."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            given = frame.f_locals.get("custom_generate")
            if isinstance(given, str):
                return given
        frame = frame.f_back
    raise ValueError(
        "expected to be called by transformers' generate(custom_generate=FOLDER_OR_REPOSITORY): "
        "where the call comes another way, name the heads with heads="
    )
