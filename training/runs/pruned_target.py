"""Where a draft model begins: as some layers of its target, or as a fresh model of its kind."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa_heads.checkpoint.draft_checkpoint import check_vocabulary, load_draft
from medusa_heads.errors import first_line
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.meta_target import meta_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS_SHARE = 4  # by default one of so many layers of the target


def begin_draft(
    target: TargetModel,
    *,
    draft_model: str | None = None,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM to be trained as a draft model, in fp32, on the target's device.

    Args:
        target: whose drafts it will make.
        draft_model: a hub id or folder to go on from, of the target's vocabulary.
        num_layers: else, how many of the target's layers. Default: a quarter, rounded up.
        hidden_size: of a fresh model; without one, the target's own weights are the beginning.

    Raises:
        ValueError: sizes that cannot be, a quantised target, or another vocabulary.
    """
    if draft_model is not None:
        given = load_draft(
            draft_model, target, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        model = given.model
    else:
        chosen = _chosen(target, num_layers)
        model = fresh(target, chosen, hidden_size) if hidden_size else pruned(target, chosen)
    trained: Any = model
    trained.to(device=target.device, dtype=torch.float32)
    trained.generation_config = copy.deepcopy(target.model.generation_config)
    trained.requires_grad_(True)
    return model


def draft_shape(
    target: TargetModel,
    *,
    draft_model: str | None = None,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """What `begin_draft` would make of the same, without weights (on the meta device).

    Raises:
        ValueError: sizes that cannot be, or a draft model that is none, or of another vocabulary.
    """
    if draft_model is not None:
        given = meta_target(
            TargetArguments(draft_model, dtype="float32", trust_remote_code=trust_remote_code)
        )
        check_vocabulary(given, target)
        return given.model
    chosen = _chosen(target, num_layers)
    with torch.device("meta"):
        if hidden_size:
            return fresh(target, chosen, hidden_size)
        return _from_config(_smaller_config(target, chosen))


def _chosen(target: TargetModel, num_layers: int | None) -> list[int]:
    layers = int(target.config.num_hidden_layers)
    wanted = -(-layers // LAYERS_SHARE) if num_layers is None else num_layers
    if not 1 <= wanted <= layers:
        raise ValueError(f"the target has {layers} layers, {wanted} of them were asked for")
    return spread(layers, wanted)


def spread(layers: int, wanted: int) -> list[int]:
    """Which of the target's layers to take: the first, the last, and evenly between."""
    if wanted == 1:
        return [0]
    return [round(i * (layers - 1) / (wanted - 1)) for i in range(wanted)]


def pruned(target: TargetModel, chosen: list[int]) -> PreTrainedModel:
    """The target with these layers alone: its embeddings, norms and lm_head are copied too.

    Raises:
        ValueError: the target is quantised, or not built of numbered layers.
    """
    if getattr(target.config, "quantization_config", None) is not None:
        raise ValueError(
            "the layers of a quantised target cannot be trained: load it unquantised, or give a "
            "draft_model or a draft_hidden_size"
        )
    model = _from_config(_smaller_config(target, chosen))
    place, source = _layer_place(model), _layer_place(target.model)
    weights = target.model.state_dict()
    taken: dict[str, Tensor] = {}
    for name in model.state_dict():
        before, found, after = name.partition(place)
        where = name
        if found and not before:
            number, _, rest = after.partition(".")
            where = f"{source}{chosen[int(number)]}.{rest}"
        if where not in weights:
            raise ValueError(
                f"{type(target.model).__name__} has no weights {where!r} that a smaller copy "
                "needs: give a draft_model or a draft_hidden_size"
            )
        taken[name] = weights[where]
    model.load_state_dict(taken)
    return model


def fresh(target: TargetModel, chosen: list[int], hidden_size: int) -> PreTrainedModel:
    """A model of the target's kind and vocabulary, narrower and with random weights.

    Raises:
        ValueError: no whole number of attention heads fits that width.
    """
    config = _smaller_config(target, chosen)
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
    return _from_config(config)


def _smaller_config(target: TargetModel, chosen: list[int]) -> Any:
    config = copy.deepcopy(target.config)
    layers = config.num_hidden_layers
    # Lists with an entry a layer: kinds of attention, of feed-forward blocks, of positions, ...
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, [value[i] for i in chosen])
    config.num_hidden_layers = len(chosen)
    # A draft model need not cap its logits as the target does, and learns the same without.
    for name in ("final_logit_softcapping",):
        if getattr(config, name, None):
            setattr(config, name, None)
    return config


def _from_config(config: Any) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise ValueError(
            f"no smaller {config.model_type} can be made ({reason}): give a draft_model"
        ) from error
    return model


def _layer_place(model: Any) -> str:
    """The name below which the numbered layers stand, such as `model.layers.`."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return f"{name}."
    raise ValueError(
        f"{type(model).__name__} is not built of {layers} numbered layers: give a draft_model or a "
        "draft_hidden_size"
    )
