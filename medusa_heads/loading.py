"""A causal LM by its name: one sentence where there is none, and the commit it came from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from medusa_heads.contents import refuse_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_causal_lm(
    name: str, *, dtype: str | torch.dtype, trust_remote_code: bool, **kwargs: Any
) -> PreTrainedModel:
    """Load a causal LM by hub id or local path; further arguments go to transformers.

    Raises:
        ValueError: nothing loadable stands there, or heads.
    """
    refuse_heads(name)
    # No hub id looks like this: the hub need not be asked, several times, for many seconds.
    path_like = name.startswith((".", "/", "~")) or name.count("/") > 1
    if path_like:
        name = str(Path(name).expanduser())
        if not Path(name).is_dir():
            raise ValueError(f"expected a causal language model in a folder {name!r}, found none")
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    model: Any
    try:
        with _quiet_hub():
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, trust_remote_code=trust_remote_code, **kwargs
            )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"expected a causal language model (a hub id or a local folder) at {name!r}: {reason}"
        ) from error
    if not path_like and not Path(name).is_dir():
        model.config._commit_hash = _commit(name, kwargs)
    loaded: PreTrainedModel = model
    return loaded


def _commit(repo_id: str, where: dict[str, Any]) -> str | None:
    """The commit that a model was just loaded at, which transformers 5.23 no longer says: the name
    of its folder in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    kwargs = {name: where[name] for name in ("revision", "cache_dir") if where.get(name)}
    found = try_to_load_from_cache(repo_id, "config.json", **kwargs)
    return Path(found).parent.name if isinstance(found, str) else None


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """The hub's client reports every failed attempt; the error that follows says it once."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
