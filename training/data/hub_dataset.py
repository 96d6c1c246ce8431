"""Corpora from the hub, with a quick answer where the hub cannot be reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from medusa_heads.errors import first_line

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_PATIENCE_S = 10


def load_hub_dataset(
    name: str, splits: Sequence[str], config: str | None, streaming: bool
) -> Dataset | IterableDataset:
    """The first of `splits` that a hub dataset has; from the local cache if there is no network.

    Raises:
        ValueError: there is no such dataset, configuration or split, or it cannot be reached.
    """
    from datasets import load_dataset

    problem = _unreachable(name)
    with _offline(problem is not None):
        for split in splits:
            try:
                return load_dataset(name, config, split=split, streaming=streaming)
            except (ValueError, OSError, RuntimeError) as error:
                # "Unknown split", "Bad split": the next name may fit.
                if "split" in str(error).lower() and split != splits[-1]:
                    continue
                reason = problem or first_line(error)
                raise ValueError(
                    f"expected a corpus at {name!r}: no such file or folder, and no hub dataset "
                    f"that can be read ({reason})"
                ) from error
    raise AssertionError("at least one split is asked for")


def _unreachable(name: str) -> str | None:
    """Why the hub does not answer for this dataset; None if it does, or says there is none.

    datasets itself retries for half a minute before it says so.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off by HF_HUB_OFFLINE"
    try:
        HfApi().dataset_info(name, timeout=_PATIENCE_S)
    except HFValidationError as error:
        raise ValueError(f"{name!r} is neither a file nor the id of a dataset") from error
    except HfHubHTTPError as error:
        raise ValueError(
            f"expected a corpus at {name!r}: no such file or folder, and the hub refuses a dataset "
            f"of that name ({first_line(error)})"
        ) from error
    # Which exception a missing network is depends on the hub client's HTTP library.
    except Exception as error:
        return f"the hub cannot be reached: {first_line(error)}"
    return None


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    import datasets
    from huggingface_hub import constants

    holders: list[Any] = [constants, datasets.config]
    before = [holder.HF_HUB_OFFLINE for holder in holders]
    for holder in holders:
        holder.HF_HUB_OFFLINE = holder.HF_HUB_OFFLINE or wanted
    try:
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.HF_HUB_OFFLINE = value
