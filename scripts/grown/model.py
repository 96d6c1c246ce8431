"""A small target and its heads grown in memory, compared with what they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, logging
from transformers.utils.logging import disable_progress_bar

from medusa_heads import MedusaModel, TargetModel
from medusa_heads.checkpoint.checkpoint import LoadedHeads, load_heads
from medusa_heads.heads import DraftHeads
from medusa_heads.hub.pull import find_checkpoint
from medusa_heads.inference.bench.prompts import held_out_prompts
from medusa_heads.inference.models.named_target import named_target
from scripts.grown.heads import grow_heads
from scripts.grown.hybrid import grow_hybrid
from scripts.grown.llama import grow_llama
from scripts.grown.rotated import rotate
from scripts.grown.shape import SHAPES, Placement, Shape

_GROW: dict[str, Any] = {"llama": grow_llama, "qwen3_5_text": grow_hybrid}


@dataclass(frozen=True)
class GrownModel:
    """A grown target, perhaps with heads, beside the small one.

    Attributes:
        small: as it was loaded, in float32.
        loaded: its heads, where some were given.
        target: grown.
        heads: grown.
        place: where the small one lies within the large one.
    """

    small: TargetModel
    loaded: LoadedHeads | None
    target: TargetModel
    heads: DraftHeads | None
    place: Placement

    def differences(self) -> dict[str, tuple[float, float]]:
        """Of target and heads: the largest difference of logits on a text of random tokens, and how
        far they spread."""
        small, target = self.small, self.target
        random = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(small.vocab_size, (1, 32), generator=random)
        grown_ids_BT = ids_BT.to(target.device)
        with torch.no_grad():
            hidden, grown_hidden = small.hidden(ids_BT), target.hidden(grown_ids_BT)
            found = {
                "target": (
                    small.get_output_embeddings()(hidden),
                    target.get_output_embeddings()(grown_hidden),
                )
            }
            if self.loaded is not None and self.heads is not None:
                heads = self.loaded.heads
                # What follows each position, as many tokens as there are heads.
                following_BTK = torch.stack(
                    [ids_BT.roll(-1 - i, dims=1) for i in range(heads.config.num_heads)], dim=-1
                )
                grown_following_BTK = following_BTK.to(target.device)
                found["heads"] = (
                    heads(heads.encode(hidden, ids_BT), following_BTK),
                    self.heads(self.heads.encode(grown_hidden, grown_ids_BT), grown_following_BTK),
                )
        return {name: _difference(*logits) for name, logits in found.items()}


def load_small(name: str, revision: str | None = None) -> TargetModel:
    """The target to grow, of a hub at a revision, without the bars and warnings of loading.

    Raises:
        ValueError: nothing loadable stands there, or it is neither a Llama nor a Qwen3.5 hybrid.
    """
    _load_quietly()
    at: dict[str, Any] = {} if revision is None else {"revision": revision}
    small = TargetModel.from_pretrained(name, dtype=torch.float32, use=None, **at)
    config: Any = small.model.config
    if config.model_type not in _GROW:
        raise ValueError(
            f"only Llama models and Qwen3.5 hybrids can be grown, {name!r} is of type "
            f"{config.model_type!r}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name!r} is quantised: grow the model it was made of")
    return small


def grow(
    small: TargetModel,
    heads: str | None,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: str | torch.device | None = None,
    seed: int = 0,
    rotation: int | None = None,
) -> GrownModel:
    """Grow a target, and heads with it.

    Args:
        small: what load_small returned.
        heads: its heads checkpoint, a folder or on a hub.
        shape: what it grows to.
        dtype: of the grown weights.
        device: where they are made; nothing of their size is held elsewhere.
        seed: of the noise in weights that nothing reads.
        rotation: seed of a random basis for the target, which heads cannot have.

    Raises:
        ValueError: target, heads or shape cannot be grown.
    """
    if rotation is not None and heads is not None:
        raise ValueError(
            "heads cannot be rotated with their target, because their SiLU sees each channel "
            "alone: train heads for the rotated target"
        )
    old: Any = small.model
    kind = old.config.model_type
    if rotation is not None and kind != "llama":
        raise ValueError(f"only a Llama is given a random basis, the target is of type {kind!r}")
    loaded = None if heads is None else load_heads(find_checkpoint(heads), small)
    model, place = _GROW[kind](old, shape, dtype=dtype, device=device, seed=seed)
    if rotation is not None:
        rotate(model, place, rotation)
    model.generation_config = old.generation_config
    target = TargetModel(model)
    target.freeze()
    grown_heads = None
    if loaded is not None:
        grown_heads = grow_heads(loaded, target, place, dtype=dtype, seed=seed)
        grown_heads.to(target.device)
    return GrownModel(small, loaded, target, grown_heads, place)


def grown_medusa(
    checkpoint: str,
    shape: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device | None = None,
    tree: str = "none",
) -> tuple[MedusaModel, GrownModel | None]:
    """A heads checkpoint and the target that it names, grown together or as they are, ready to
    decode.

    Args:
        checkpoint: a folder, or on a hub.
        shape: one of SHAPES by name; `own`: they do not grow.
        dtype, device: see grow.
        tree: as MedusaModel takes it.

    Raises:
        ValueError: see grow.
    """
    options: dict[str, Any] = {"tree": tree, "compile": False}
    if shape == "own":
        _load_quietly()
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        return MedusaModel.from_pretrained(checkpoint, **where, **options), None
    name, revision = named_target(find_checkpoint(checkpoint))
    small = load_small(name, revision)
    grown = grow(small, checkpoint, SHAPES[shape], dtype=dtype, device=device)
    model: Any = grown.target.model
    model.config._name_or_path = f"{name} grown to {shape}"
    assert grown.loaded is not None and grown.heads is not None
    statistics = grown.loaded.statistics
    return MedusaModel(grown.target, grown.heads, statistics=statistics, **options), grown


def prompts_of(checkpoint: str, count: int, length: int) -> list[list[int]]:
    """Held-out text in tokens of the target that heads name: other text than train-heads, which
    draws with the seed 0, measures them on."""
    name, revision = named_target(find_checkpoint(checkpoint))
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main")
    return held_out_prompts(tokenizer, num_prompts=count, prompt_length=length, seed=1)


def _load_quietly() -> None:
    """From now on without the bars and warnings of loading."""
    logging.set_verbosity_error()
    disable_progress_bar()


def _difference(before: Tensor, after: Tensor) -> tuple[float, float]:
    after = after[..., : before.shape[-1]].to("cpu", torch.float32)
    return float((before - after).abs().max()), float(before.std())
