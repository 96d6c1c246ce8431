"""Strings that end a text, whoever says them: the call, its configuration or the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria


def with_stop_strings(
    criteria: StoppingCriteriaList | None,
    tokenizer: Any,
    configs: Sequence[GenerationConfig | None],
    options: dict[str, Any],
) -> StoppingCriteriaList | None:
    """What ends the texts of a call, its stop strings among it, of which generate() is then told
    none in the options.

    Args:
        configs: the call's configuration and the model's, which is asked where that says nothing.
        options: others of generate(), which go before both.

    Raises:
        ValueError: there are such strings and no tokenizer; or tokens are to be healed by one.
    """

    def asked(name: str) -> Any:
        said = (getattr(config, name, None) for config in configs)
        return options.get(name) if name in options else next(filter(None, said), None)

    if asked("token_healing"):
        raise ValueError("tree decoding does not support token_healing: leave it out")
    if not (strings := asked("stop_strings")):
        return criteria
    if tokenizer is None:
        raise ValueError("stop_strings need the tokenizer: pass tokenizer= as well")
    options["stop_strings"] = None
    return StoppingCriteriaList([*(criteria or []), StopStringCriteria(tokenizer, strings)])
