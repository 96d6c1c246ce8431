"""Multi-token-prediction modules: layers that a checkpoint brings to predict later tokens, which
its model does not run (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

transformers knows their weights and runs them; here they are found, and read or refused. They share
the target's embeddings, its lm_head and its rotary positions.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from medusa_heads.errors import UnsupportedArchitecture, first_line
from medusa_heads.target.recurrent import is_recurrent
from medusa_heads.target.target import TargetModel

_INSTEAD = "draft with the target's own text ('auto')"
_COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
_SHOWN = 160  # characters of what transformers objects to


def load_mtp(target: TargetModel, source: str | os.PathLike[str] | None = None) -> Any:
    """The target's modules, frozen, on its device and in its dtype: transformers' `MtpModel`. They
    are those of the target's own checkpoint, or those that a folder or hub id holds instead. Raises
    ValueError: this transformers does not run them, or the checkpoint has none that can be read;
    UnsupportedArchitecture: they keep a recurrent state."""
    from safetensors import SafetensorError

    kind, view = _mtp_model(), _as_checkpoint(target)
    view.config._name_or_path = str(_folder(target) if source is None else source)
    try:
        modules = kind.from_pretrained(view, device_map={"": target.device})
    except (
        *(AttributeError, LookupError, OSError, RuntimeError, StopIteration),
        *(SafetensorError, TypeError, ValueError),
    ) as error:
        reason = first_line(error)
        if "weights are missing" in reason:  # and then all their names
            reason = "some or all of their weights are missing"
        raise _none(target, reason[:_SHOWN], source) from error
    own_parts(modules).eval().requires_grad_(False)
    return modules


def empty_mtp(target: TargetModel) -> Any:
    """Modules as the target's configuration describes them, on the meta device, without weights.
    Raises as `load_mtp` does."""
    kind, view = _mtp_model(), _as_checkpoint(target)
    with torch.device("meta"):
        return kind(view, view.config.get_text_config(decoder=True).num_mtp_layers)


def own_parts(modules: Any) -> torch.nn.ModuleDict:
    """What is the modules' own, by the names it has in them: all else is the target's."""
    names = ("layers", "shared_post_norm")
    return torch.nn.ModuleDict(
        {name: getattr(modules, name) for name in names if name in modules._modules}
    )


def stored_tensors(
    target: TargetModel, modules: Any, source: str | os.PathLike[str] | None = None
) -> dict[str, Tensor]:
    """The modules' weights under the names, and in the pieces, of the checkpoint they came from
    (see `load_mtp`). Raises ValueError: transformers joins pieces in a way that cannot be undone.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        apply_renamings,
        revert_weight_conversion,
    )

    view = _as_checkpoint(target)
    conversions = modules.get_weight_conversions(view)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    pattern = modules.get_mtp_weights_regex(view)
    place = str(_folder(target) if source is None else source)
    # A converter stands behind all renamings: so far the names of what it joins are read alike.
    names = {
        apply_renamings(name, renamings): name
        for name in _stored_names(place)
        if pattern.search(name)
    }
    carrier = copy.copy(modules)
    carrier._weight_conversions = [e for e in conversions if isinstance(e, WeightConverter)]
    weights = own_parts(modules).state_dict()
    pieces: Mapping[str, Tensor] = revert_weight_conversion(carrier, weights)
    if unknown := sorted(set(pieces) - set(names)):
        raise ValueError(
            f"the multi-token-prediction modules of {target.config.model_type} cannot be written "
            f"under the names of {place!r}, which has nothing for {unknown[0]}"
        )
    return {names[name]: piece.detach().cpu().contiguous() for name, piece in pieces.items()}


def check_names(target: TargetModel, names: Iterable[str]) -> None:
    """Raises ValueError where a tensor of a checkpoint is none of the target's modules, by its
    name; or as `load_mtp` does."""
    pattern = _mtp_model().get_mtp_weights_regex(_as_checkpoint(target))
    if foreign := [name for name in names if not pattern.search(name)]:
        raise ValueError(
            f"{foreign[0]} is no weight of multi-token-prediction modules of "
            f"{target.config.model_type}: copy the modules anew"
        )


def _stored_names(place: str) -> list[str]:
    """Of all tensors of a checkpoint in a folder or on a hub, of which only headers are read."""
    from safetensors import safe_open
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    files, index = _get_resolved_checkpoint_files(
        pretrained_model_name_or_path=place,
        variant=None,
        gguf_file=None,
        use_safetensors=True,
        user_agent=None,
        is_remote_code=False,
    )
    if index is not None:
        return list(index["weight_map"])
    names: list[str] = []
    for file in files or ():
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


def _mtp_model() -> Any:
    """transformers' class of modules. Raises ValueError: this version has none whose layers can be
    run one by one."""
    from transformers import __version__, modeling_layers

    kind = getattr(modeling_layers, "MtpModel", None)
    if not hasattr(kind, "forward_layer"):
        raise ValueError(
            "multi-token-prediction modules need transformers 5.20 or later, and this is "
            f"{__version__}: update transformers, or {_INSTEAD}"
        )
    return kind


def _as_checkpoint(target: TargetModel) -> Any:
    """The model as its checkpoint's modules are to be read: the same layers, with a configuration
    of its own. Raises ValueError: no modules are to be expected; UnsupportedArchitecture: they keep
    a recurrent state."""
    view = copy.copy(target.model)
    view.config = copy.deepcopy(target.model.config)
    text = view.config.get_text_config(decoder=True)
    counts = [value for name in _COUNTS if isinstance(value := getattr(text, name, None), int)]
    if counts and not any(counts):
        raise _none(target, f"its configuration says {counts[0]}")
    _fill(text, next(filter(None, counts), 1))
    view.config.dtype = target.dtype
    # transformers knows the keys of modules by what a model leaves out; where they are numbered
    # behind its layers it only knows the largest sizes of each family.
    known = target.model._keys_to_ignore_on_load_unexpected or ()
    behind = range(text.num_hidden_layers, text.num_hidden_layers + text.num_mtp_layers)
    view._keys_to_ignore_on_load_unexpected = {
        *(pattern for pattern in known if "mtp" in pattern or "layers" in pattern),
        *(rf"^(model\.)?(language_model\.)?layers\.{layer}\." for layer in behind),
    }
    if is_recurrent(view.config.get_mtp_config()):
        raise UnsupportedArchitecture(
            f"the multi-token-prediction modules of {target.config.model_type} keep a recurrent "
            "state, which drafts would change before they are verified",
            _INSTEAD,
        )
    return view


def _fill(text: PreTrainedConfig, number: int) -> None:
    """Say of the modules what the configuration leaves open: they are like the last layer."""
    text.num_mtp_layers = number
    for name in ("layer_types", "mlp_layer_types"):
        of_layers, of_modules = getattr(text, name, None), getattr(text, f"mtp_{name}", None)
        if of_layers and not of_modules:
            setattr(text, f"mtp_{name}", [of_layers[-1]] * number)


def _folder(target: TargetModel) -> Path:
    """Where the target's checkpoint lies: one of a hub was fetched when the target was loaded."""
    from transformers.utils import cached_file

    name = target.name_or_path
    if not name:
        raise _none(target, "it was made in memory")
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(str(cached_file(name, "config.json", revision=target.revision))).parent
    except (OSError, ValueError) as error:
        raise _none(target, first_line(error)[:_SHOWN]) from error


def _none(
    target: TargetModel, reason: str, source: str | os.PathLike[str] | None = None
) -> ValueError:
    name = target.name_or_path or target.config.model_type
    where = "" if source is None else f" from {os.fspath(source)!r}"
    return ValueError(
        f"no multi-token-prediction modules can be read{where} for the target {name!r} ({reason}): "
        f"{_INSTEAD}, train heads for it, or train the modules of the model that it was fine-tuned "
        "from (train-heads --mtp --mtp_from)"
    )
