"""What a call of a decoder's generate() says that transformers' own is not to hear, strings that
end a text among it; and whether the decoder is still made for its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from medusa_heads.inference.engine.capability import Capability, capability, look_again
from medusa_heads.inference.engine.given.cache import mark_given
from medusa_heads.target.graphs.captured import CapturedTarget
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

NOT_IN_STEP = "tree decoding does not keep sharded processes in step: gather first"


def take_own(options: dict[str, Any], assistant_model: Any) -> None:
    """Take it out of a call's options, which are left to transformers. Raises ValueError: somebody
    else is to draft or to decode, or processes are to be kept in step."""
    if options.get("cache_implementation") == "paged":  # generate() would ask no decoding method
        raise ValueError(
            "tree decoding does not support cache_implementation='paged': leave it out, or call "
            "the target's own generate()"
        )
    if assistant_model is not None:
        raise ValueError("drafts come from elsewhere here: leave assistant_model out")
    if options.pop("custom_generate", None) is not None:
        raise ValueError(
            "this decoder is a decoding method itself: leave custom_generate out, or call the "
            "target's own generate()"
        )
    if options.pop("synced_gpus", None):  # of which generate() says nothing to `decode`
        raise ValueError(NOT_IN_STEP)
    mark_given(options)


def with_stop_strings(
    criteria: StoppingCriteriaList | None,
    tokenizer: Any,
    configs: Sequence[GenerationConfig | None],
    options: dict[str, Any],
) -> StoppingCriteriaList | None:
    """What ends the texts of a call, its stop strings among it, of which generate() is then told
    none in the options: it hands a custom decoding method no tokenizer. Raises ValueError: there
    are such strings and no tokenizer; or tokens are to be healed by one.

    Args:
        configs: the call's configuration and the model's, which is asked where that says nothing.
        options: others of generate(), which go before both.
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
    if any(type(each) is StopStringCriteria for each in criteria or []):
        return criteria  # in place of what generate() would make of the strings
    return StoppingCriteriaList([*(criteria or []), StopStringCriteria(tokenizer, strings)])


def _refuse_adapters_by_row(model: Any) -> None:
    """Raises ValueError: peft is to use an adapter for each row of a batch, whose rows leave as
    they end. Its hooks for that are removed before: where something is raised it leaves them."""
    names = [
        (module, number)
        for module in (model.modules() if hasattr(model, "peft_config") else ())
        for number, hook in module._forward_pre_hooks.items()
        if "adapter_names" in getattr(hook, "keywords", ())
    ]
    for module, number in names:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)
    if names:
        raise ValueError(
            "tree decoding does not support adapter_names for a batch, whose rows leave as they "
            "end: decode the rows of each adapter with set_adapter"
        )


class Made(NamedTuple):
    """What drafters were made for: tokens that a target writes and reads, and what it verifies."""

    written: int
    read: int
    verifies: Capability

    @classmethod
    def of(cls, target: TargetModel, verifies: Capability) -> Made:
        return cls(target.vocab_size, target.readable, verifies)

    def check(self, target: TargetModel, rows: int = 1) -> None:
        """Raises ValueError: the target is another one by now; or so many rows, or this target,
        cannot be decoded within what is around the call; or, as an UnsupportedArchitecture, it can
        no longer be decoded exactly."""
        if rows > 1:
            _refuse_adapters_by_row(target.model)
        if not isinstance(getattr(target.get_output_embeddings(), "weight", None), Tensor):
            raise ValueError(
                "the lm_head of the target is no longer a matrix, as where it was quantised: "
                "quantise the target without its lm_head, and make the decoder anew"
            )
        if isinstance(target, CompiledTarget) and not target.reads_lm_head:
            raise ValueError(
                "the lm_head of the target is another module by now, which a compiled decoder does "
                "not read: make the decoder anew"
            )
        compiled = isinstance(target, CompiledTarget) and not isinstance(target, CapturedTarget)
        device = target.device.type
        if (
            compiled
            and torch.is_autocast_enabled(device)
            and torch.get_autocast_dtype(device) != target.dtype
        ):
            raise ValueError(
                f"a compiled target of {target.dtype} is not decoded within torch.autocast: leave "
                "compile out there"
            )
        look_again(target)
        names = "vocabulary", "vocabulary", "capability to verify drafts"
        anew = Made.of(target, capability(target))
        for name, before, now in zip(names, self, anew, strict=True):
            if now != before:
                raise ValueError(
                    f"the target's {name} has changed from {before} to {now}: make the decoder anew"
                )
