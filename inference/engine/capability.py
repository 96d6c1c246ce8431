"""What a target can be trusted to verify: a token tree, only a chain, only a chain from a recurrent
state that is put back where drafts are refused, or nothing.

Names are checked first, then numbers, on this very model: see probe.py. An architecture that would
decode wrongly is so refused at attach time, not noticed in its output.

What was found is remembered for this model in this process, and not on disk: code that was patched,
a hook or an adapter decide as well, and no configuration tells of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any, Literal

import torch

from medusa_heads.agreement import TOLERANCE, is_half
from medusa_heads.errors import UnsupportedArchitecture, warn
from medusa_heads.inference.engine.probe import (
    CHAIN,
    TREE,
    Prober,
    few_rows_chosen,
    indexers,
    takes_positions,
)
from medusa_heads.inference.engine.recurrent_probe import BatchProber, RecurrentProber
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.packed.matrices import unpacked
from medusa_heads.target.recurrent import RecurrentCache
from medusa_heads.target.target import TargetModel

Capability = Literal["tree", "chain", "recurrent"]

_known: weakref.WeakKeyDictionary[Any, dict[type, Capability]] = weakref.WeakKeyDictionary()
# Models whose rows, padded ones or not, are each decoded as if it were alone.
_known_batches: weakref.WeakKeyDictionary[Any, set[tuple[type, bool]]] = weakref.WeakKeyDictionary()

# Of what modules and kinds of weights a model was made when it was tried.
_made_of: weakref.WeakKeyDictionary[Any, list[type]] = weakref.WeakKeyDictionary()

# Held while a model is tried, which is set for that: two threads would each put back what the other
# has set. Whoever holds it tries other views of the model, too.
_EXAMINING = RLock()


def capability(target: TargetModel) -> Capability:
    """Whether the target verifies a tree exactly, or only a chain, perhaps from a recurrent state;
    tried once a model. Raises UnsupportedArchitecture: none of them, and why."""
    known = _known.setdefault(target.model, {})
    if type(target) in known:
        return known[type(target)]
    with _EXAMINING:
        if type(target) in known:  # another thread has tried it meanwhile
            return known[type(target)]
        try:
            # Of the model's own matrices: packing is not for all, and proved by itself.
            with _trying(target, "several new tokens over a cache"), unpacked():
                known[type(target)] = _examine(target)
        except UnsupportedArchitecture as error:
            if target.model.training:
                why = f"{target.config.model_type} is in training mode, and {error.reason}"
                raise UnsupportedArchitecture(why, "call its eval() first") from error
            if not isinstance(target, CompiledTarget):
                raise
            capability(TargetModel(target.model))  # where that fails too, it says more
            raise UnsupportedArchitecture(error.reason, "leave compile out") from error
    return known[type(target)]


def look_again(target: TargetModel) -> None:
    """Forget what is known of a model that is made of other modules or kinds of weights by now, as
    where it was quantised in place."""
    kinds, left = list[type](), list[Any]([target.model])
    seen = {None, target.model}
    for module in left:  # which grows; every text asks, and modules() takes twice the time
        kinds.append(type(module))
        kinds.extend(map(type, module._parameters.values()))
        for part in module._modules.values():
            if part not in seen:
                seen.add(part)
                left.append(part)
    if _made_of.setdefault(target.model, kinds) != kinds:
        with _EXAMINING:
            _made_of[target.model] = kinds
            _known.pop(target.model, None)
            _known_batches.pop(target.model, None)


def check_batch(target: TargetModel, padding: Sequence[int]) -> None:
    """Whether rows with so many slots of left padding are each decoded as if it were alone; tried
    once a model, where there is a recurrent state. Raises UnsupportedArchitecture: they are not,
    and why."""
    trusted, kind, padded = capability(target), target.config.model_type, any(padding)
    if trusted == "tree" or (len(padding) == 1 and not padded):
        return
    alone = "decode one unpadded sequence at a time"
    if trusted == "chain":
        why = "goes by cache slots, which a batch does not keep in step"
        raise UnsupportedArchitecture(f"{kind} {why}", alone)
    known = _known_batches.setdefault(target.model, set())
    if (type(target), padded) in known:
        return
    if len(padding) > 1 and not target.new_cache().rows_stand_alone:
        why = "compresses tokens of all rows of a batch together, however far each of them is"
        raise UnsupportedArchitecture(f"{kind} {why}", alone)
    with _EXAMINING, _trying(target, "a batch of texts"):
        fault = BatchProber(target, padded=padded).probe().fault(target.dtype)
    if fault is not None:
        why = "padding leaves traces in" if padded else "rows of a batch change each other in"
        raise UnsupportedArchitecture(f"{why} the recurrent state of {kind} ({fault})", alone)
    known.add((type(target), padded))


@contextmanager
def _trying(target: TargetModel, what: str) -> Iterator[None]:
    """Within the block the target is read uncompiled; what it fails on is no architecture for us.
    Raises UnsupportedArchitecture: it fails."""
    try:
        with target.uncompiled() if isinstance(target, CompiledTarget) else nullcontext():
            yield
    except (UnsupportedArchitecture, torch.OutOfMemoryError):
        raise
    # Whatever a model's own code objects to.
    except (
        *(AssertionError, AttributeError, LookupError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        raise UnsupportedArchitecture(
            f"{target.config.model_type} fails on {what} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        ) from error


def _is_sharded(target: TargetModel) -> bool:
    # However it came about: what processes share are DTensors.
    shared = any(hasattr(parameter, "full_tensor") for parameter in target.model.parameters())
    return shared or (getattr(target.model, "_tp_size", None) or 1) > 1


def _couples_tokens(target: TargetModel) -> bool:
    """Random text need not have an outlier, so the numbers alone would not tell."""
    how: Any = getattr(target.model.config, "quantization_config", None)
    return bool(getattr(how, "load_in_8bit", False) and how.llm_int8_threshold > 0)


def _is(*kinds: str) -> Callable[[TargetModel], bool]:
    return lambda target: target.config.model_type in kinds


Check = Callable[[TargetModel], bool]
# Of torchao, compressed-tensors, fp8 in blocks, and bitsandbytes.
_ROUNDED = (
    "DynamicActivation",
    "'input_activations': {",
    "'activation_scheme': '",
    "'load_in_8bit': True",
)

# Targets that verify nothing: why, and what to do instead.
_NOTHING: Sequence[tuple[Check, str, str]] = (
    (
        _is_sharded,
        "the weights of {kind} are spread over several processes, each of which would measure "
        "its own steps and choose its own drafts, and wait for the others in vain",
        "load it whole in each process, without tp_plan",
    ),
    (
        _couples_tokens,
        "{kind} is loaded in 8 bits with a threshold for outliers, which bitsandbytes looks "
        "for in all tokens of a forward together, so that they change each other",
        "load the target with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)",
    ),
    (  # where generate() is not what the model's own forward says, nothing is to be equal to
        _is("moshi"),
        "{kind} cannot be followed: its cache drops rows that leave a window, which its attention "
        "does not have",
        "decode with transformers' own generate()",
    ),
)
# Targets that verify no tree: attention goes by cache slot rather than by position in the text,
# whatever mask is given.
_NO_TREE: Sequence[tuple[Check, str]] = (
    (
        lambda target: _is("bloom", "mpt")(target) or getattr(target.config, "alibi", False),
        "its ALiBi bias follows the cache slot, not the position in the text",
    ),
    (
        _is("gpt_neo"),
        "its local attention window follows the cache slot, not the position in the text",
    ),
    (lambda target: not takes_positions(target), "its forward takes no position_ids"),
    (
        lambda target: target.new_cache().keeps_index and not indexers(target),
        "nothing says how many rows its indexer chooses, and so no short text shows which",
    ),
)


def _examine(target: TargetModel) -> Capability:
    cache = target.new_cache()  # refuses caches of other kinds, and attention that takes no mask
    kind = target.config.model_type
    for applies, why, instead in _NOTHING:
        if applies(target):
            raise UnsupportedArchitecture(why.format(kind=kind), instead)
    if isinstance(cache, RecurrentCache):
        with few_rows_chosen(target):
            fault = RecurrentProber(target).probe(CHAIN).fault(target.dtype)
        if fault is not None:
            raise UnsupportedArchitecture(
                f"{kind} keeps a recurrent state, on which several tokens at once do not do what "
                f"each of them does alone ({fault})"
            )
        _warn_of_chains(kind, "it keeps a recurrent state, which follows one path at a time")
        return "recurrent"
    reason = next((why for applies, why in _NO_TREE if applies(target)), None)
    dtype = target.dtype
    if reason is None:
        with few_rows_chosen(target):
            tree = (prober := Prober(target)).probe(TREE)
            fails = tree.fault(dtype) is not None
            if not is_half(dtype) and (_says_it_rounds(target) or (fails and _rounds(prober))):
                dtype = torch.bfloat16
                warn(
                    f"{kind} rounds activations within its forward: where two tokens are nearly as "
                    "likely its text may differ from generate()'s, as in half precision",
                    above=4,
                )
        reason = tree.fault(dtype)
    if reason is None:
        return "tree"
    if (fault := Prober(target).probe(CHAIN).fault(dtype)) is not None:
        raise UnsupportedArchitecture(
            f"{kind} cannot verify drafts exactly (as a tree, {reason}; as a chain, {fault})"
        )
    _warn_of_chains(kind, reason)
    return "chain"


def _rounds(prober: Prober) -> bool:
    """Whether forwards of a target in full precision differ from one another as those in half
    precision do, with no tree in them."""
    whole, half = TOLERANCE
    return whole < prober.own_error() <= half


def _says_it_rounds(target: TargetModel) -> bool:
    """Whether activations are quantised by its configuration. A step of 8 bits is hardly ever
    crossed within a short text, so that the numbers would seldom tell."""
    how: Any = getattr(target.model.config, "quantization_config", None)
    said = how.to_dict() if hasattr(how, "to_dict") else how
    return any(word in repr(said) for word in _ROUNDED)


def _warn_of_chains(kind: str, reason: str) -> None:
    warn(f"{kind} verifies a chain of drafts, not a tree: {reason}", above=4)


def why_alone(target: TargetModel) -> str | None:
    """Why no two rows of a target can be decoded together; None where they can."""
    cache = target.new_cache()
    if not cache.can_go_back and cache.keeps_index:
        return f"{target.config.model_type} keeps a recurrent state and an index"
    try:
        check_batch(target, [0, 0])
    except UnsupportedArchitecture as error:
        return str(error)
    return None
