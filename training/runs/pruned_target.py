"""Where a draft model begins: as some layers of its target, or as a fresh model of its kind."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa_heads.checkpoint.draft_checkpoint import check_vocabulary, load_draft
from medusa_heads.errors import first_line
from medusa_heads.target.layers import decoder_of, layer_lists
from medusa_heads.target.recurrent import is_recurrent
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.meta_target import meta_target

LAYERS_SHARE = 4  # by default one of so many layers of the target


def begin_draft(
    target: TargetModel,
    *,
    draft_model: str | None = None,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
    quantised: bool = False,
) -> PreTrainedModel:
    """A causal LM to be trained as a draft model, in fp32, on the target's device: a named one of
    the target's vocabulary, to go on from; or some of the target's layers, by default a quarter,
    rounded up; with a hidden size, as many fresh ones of that width. Without `weights` its shape
    alone, on the meta device, of a target that may be there, too, and `quantised` when it is
    loaded. Raises ValueError: sizes that cannot be, a quantised target, another vocabulary, or a
    recurrent state, with which nothing drafts."""
    model: Any
    if draft_model is not None:
        trusted: Any = {"trust_remote_code": trust_remote_code}
        if weights:
            given = load_draft(draft_model, target, dtype=torch.float32, **trusted)
        else:
            given = meta_target(TargetArguments(draft_model, dtype="float32", **trusted))
        check_vocabulary(given, target)
        model = given.model
    else:
        chosen = _chosen(target, num_layers)
        if hidden_size is None:
            _refuse_quantised(target, quantised)
        with nullcontext() if weights else torch.device("meta"):
            model = _smaller(target, chosen, hidden_size)
        if hidden_size is None:
            _take_layers(model, target, chosen)
    config = model.config.get_text_config(decoder=True)
    if is_recurrent(config):
        raise ValueError(
            f"a draft model of this kind ({config.model_type}) keeps a recurrent state, which "
            "cannot go back to where the target refuses a draft: give a draft_model of attention "
            "layers alone"
        )
    if not weights:
        return model
    model.to(device=target.device, dtype=torch.float32)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    model.requires_grad_(True)
    return model


draft_shape = partial(begin_draft, weights=False)


def _chosen(target: TargetModel, num_layers: int | None) -> list[int]:
    layers = int(target.config.num_hidden_layers)
    wanted = -(-layers // LAYERS_SHARE) if num_layers is None else num_layers
    if not 1 <= wanted <= layers:
        raise ValueError(f"the target has {layers} layers, {wanted} of them were asked for")
    return spread(layers, wanted)


def spread(layers: int, wanted: int) -> list[int]:
    """Which of the target's layers to take: the first, the last, and evenly between."""
    return [round(i * (layers - 1) / max(wanted - 1, 1)) for i in range(wanted)]


def _refuse_quantised(target: TargetModel, quantised: bool) -> None:
    if quantised or getattr(target.config, "quantization_config", None) is not None:
        raise ValueError(
            "the layers of a quantised target cannot be trained: load it unquantised, or give a "
            "draft_model or a draft_hidden_size"
        )


def _take_layers(model: PreTrainedModel, target: TargetModel, chosen: list[int]) -> None:
    """Copy these layers of the target, and its embeddings, norms and lm_head, into a fresh model of
    as many. On the meta device it is only seen whether they fit."""
    place, source = _layer_place(model), _layer_place(target.model)
    # What reads images too has its layers, and what stands beside them, further down.
    above, deeper = (each.removesuffix(".").rpartition(".")[0] for each in (place, source))
    weights = target.model.state_dict()
    taken: dict[str, Tensor] = {}
    for name in model.state_dict():
        where = name
        if name.startswith(place):
            number, _, rest = name.removeprefix(place).partition(".")
            where = f"{source}{chosen[int(number)]}.{rest}"
        elif name not in weights and above and name.startswith(f"{above}."):
            where = f"{deeper}.{name.removeprefix(f'{above}.')}"
        if where not in weights:
            raise ValueError(
                f"{type(target.model).__name__} has no weights {where!r} that a smaller copy "
                "needs: give a draft_model or a draft_hidden_size"
            )
        taken[name] = weights[where].to("meta") if model.device.type == "meta" else weights[where]
    try:
        model.load_state_dict(taken)
    except RuntimeError as error:  # such as one table with columns for each layer
        raise ValueError(
            f"the weights of {type(target.model).__name__} do not fit a smaller copy: give a "
            "draft_model"
        ) from error


def _smaller(
    target: TargetModel, chosen: list[int], hidden_size: int | None = None
) -> PreTrainedModel:
    """A fresh model like the target with these layers alone; with a hidden size, narrower."""
    try:
        config = _smaller_config(target, chosen, hidden_size)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Whatever configurations and models object to when their sizes are others.
    except (
        *(AssertionError, AttributeError, LookupError, RuntimeError),
        *(StrictDataclassError, TypeError, ValueError),
    ) as error:
        reason = first_line(error)
        raise ValueError(
            f"no smaller {target.config.model_type} can be made ({reason}): give a draft_model"
        ) from error
    return model


def _smaller_config(target: TargetModel, chosen: list[int], hidden_size: int | None) -> Any:
    config: Any = copy.deepcopy(target.config)
    layers = config.num_hidden_layers  # as it was: some count the entries of one of the lists
    given = config.to_dict()
    # Lists with an entry a layer: kinds of attention, of feed-forward blocks, of positions, ...
    lists = {
        name: [value[i] for i in chosen]
        for name, value in given.items()
        if isinstance(value, list | tuple) and len(value) == layers
    }
    for name, value in lists.items():
        setattr(config, name, [*value])
    config.num_hidden_layers = len(chosen)
    # What some layers have of their own, by their numbers, such as wider attention heads (Gemma 4).
    if own := given.get("per_layer_config"):
        own = {int(number): values for number, values in own.items()}
        config.per_layer_config = {
            place: own[number] for place, number in enumerate(chosen) if number in own
        }
    # What is stored is read anew; some put a layer of a certain kind at the end then.
    stored = type(config).from_dict(config.to_dict()).to_dict()
    if changed := [name for name in lists if [*(stored.get(name) or ())] != lists[name]]:
        raise ValueError(
            f"with the layers {chosen} alone its {changed[0]} would be read otherwise, as "
            f"{stored.get(changed[0])}"
        )
    # A draft model need not cap its logits as the target does, and learns the same without.
    if getattr(config, "final_logit_softcapping", None):
        config.final_logit_softcapping = None
    if hidden_size is None:
        return config
    width = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    if hidden_size % head_dim:
        raise ValueError(
            f"the target's attention heads are {head_dim} wide: draft_hidden_size must be a "
            f"multiple of that, got {hidden_size}"
        )
    heads = hidden_size // head_dim
    groups = getattr(config, "num_key_value_heads", None)
    if groups is not None:
        # As many queries to a key as in the target, or all of them to one.
        sharing = min(config.num_attention_heads // groups, heads)
        config.num_key_value_heads = heads // sharing if heads % sharing == 0 else 1
    inner = getattr(config, "intermediate_size", None)
    if inner is not None:
        config.intermediate_size = max(round(inner * hidden_size / width / 8), 1) * 8
    config.hidden_size, config.num_attention_heads = hidden_size, heads
    return config


def _layer_place(model: Any) -> str:
    """The name below which the numbered layers stand, such as `model.layers.`; not those that look
    at images, of which there may be as many."""
    decoder = decoder_of(model)
    below = next(f"{name}." for name, part in model.named_modules() if part is decoder).lstrip(".")
    for name in layer_lists(decoder):
        return f"{below}{name}."
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    raise ValueError(
        f"{type(model).__name__} is not built of {layers} numbered layers: give a draft_model or a "
        "draft_hidden_size"
    )
