"""What becomes of a target's positions in texts longer than it was trained on.

Some rules that turn positions go by the longest one of a forward, whatever else is read in it: a
draft beyond their limit would turn the tokens before it, too. And positions in a table, such as
learnt ones, have an end, which drafts may be beyond where the text is not.

And Llama 4 scales the queries of layers without positions by where a token stands, which it takes
from the length of its cache. There a tree's nodes stand side by side, and rows that lag behind
further on than in their text: a forward over a tree is told the true slots.

Sources: transformers' `dynamic_rope_update`; "dynamic" is NTK-aware scaling, "longrope" is of Ding
et al. 2024, arXiv:2402.13753.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.attention import TreeMask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TWO_RULES, _FIRST = "longrope", "original_max_position_embeddings"
_SPARE = 2  # entries that a table of positions may have besides
TEXT_SLOTS = "text_slots"  # the argument of a forward, which models hand on to their attention
_WRAPPING = Lock()


class PositionRule(NamedTuple):
    """Of a target whose positions are others beyond a limit."""

    limit: int  # tokens of a text that have usual positions
    # Whether one way serves all longer texts, each length has a way of its own, or there are none.
    beyond: Literal["one", "each", "none"]
    # Whether the model reads its whole text again when that becomes longer.
    reads_again: bool = False

    def reads_alone(self, slots: Sequence[int], padding: Sequence[int], depth: int) -> bool:
        """Whether the newest tokens of some rows, which stand at these slots behind so much
        padding, can only be read without drafts of such a depth behind them."""
        for slot, before in zip(slots, padding, strict=True):
            position = slot - before
            if self.reads_again and slot < self.limit <= slot + depth:
                return True
            if position + depth >= self.limit and (self.beyond != "one" or position < self.limit):
                return True
        return False

    def is_read_again(self, slots: Sequence[int]) -> bool:
        """Whether a whole text is read where its newest token stands at this slot."""
        return self.reads_again and self.limit in slots

    def of_texts(
        self, max_length: int | None, length: int, padding: Sequence[int], among: int
    ) -> PositionRule | None:
        """The same for prompts of one length that are decoded to another one at most; None where it
        plays no part. Raises UnsupportedArchitecture: rows that do not advance in step would change
        one another.

        Args:
            among: how many rows they may come to be decoded with, themselves included.
        """
        if max_length is not None and max_length <= self.limit:
            return None
        if self.beyond == "one" and among == len(padding) and length - max(padding) > self.limit:
            return None
        if among > 1 and self.beyond != "none":
            raise self.refusal("for all rows of a batch at once", "decode one sequence at a time")
        return self

    def refusal(self, how: str, otherwise: str) -> UnsupportedArchitecture:
        """Of texts beyond the limit."""
        return UnsupportedArchitecture(
            f"texts of more than {self.limit} tokens turn their positions in another way, {how}",
            f"give a max_length of at most {self.limit}, or {otherwise}",
        )


def position_rule(model: PreTrainedModel) -> PositionRule | None:
    """That of a model; None where its positions go on as they began."""
    limits, varies, turns = set[int](), False, False
    for module in model.modules():
        turns |= hasattr(module, "inv_freq")
        kinds: Any = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and (limit := _limit(module, layer_type, kind)):
                limits.add(limit)
                varies |= kind != _TWO_RULES
    if not limits:
        return None if turns else _table(model)
    from transformers import GenerationMixin  # which is there, as a model is

    usual = GenerationMixin.prepare_inputs_for_generation
    own = getattr(type(model), usual.__name__) is not usual
    reads_again = own and hasattr(model.config, _FIRST)
    return PositionRule(min(limits), "each" if varies or len(limits) > 1 else "one", reads_again)


def longest_of_rows(model: PreTrainedModel) -> int | None:
    """Tokens of a text that rows which do not advance in step may have at most; None where nothing
    but the context limits them."""
    rule = position_rule(model)
    return None if rule is None or rule.beyond == "none" else rule.limit


def _limit(module: Any, layer_type: str | None, kind: str) -> int | None:
    if kind == _TWO_RULES:
        rope = module.config.rope_parameters
        return int((rope if layer_type is None else rope[layer_type])[_FIRST])
    return int(module.original_max_seq_len) if "dynamic" in kind else None


def _table(model: PreTrainedModel) -> PositionRule | None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    of_tokens = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            tables = [module.weight] * (module is not of_tokens)
        else:  # one that is reckoned and not learnt (GPT-J), but for those that grow (XGLM)
            buffers = () if hasattr(module, "get_embedding") else module.buffers(recurse=False)
            tables = [each for each in buffers if each.ndim == 2 and each.is_floating_point()]
        if any(0 <= len(table) - limit <= _SPARE for table in tables):
            return PositionRule(limit, "none")
    return None


def scales_by_slot(module: nn.Module) -> bool:
    """Whether this is attention that scales its queries by the length of its cache."""
    its = vars(module)
    return bool(its.get("attn_temperature_tuning") and "floor_scale" in its and not its["use_rope"])


def take_text_slots(model: nn.Module) -> bool:
    """Whether a model scales queries by slots; its forwards then take those of the text."""
    found = [each for each in model.modules() if scales_by_slot(each)]
    with _WRAPPING:
        for each in found:
            _take_slots(each)
    return bool(found)


def text_slots(mask: TreeMask) -> dict[str, Tensor]:
    """What a forward of such a model over a tree is given besides: the slots [B, N] that its nodes
    have in the cache of generate(), left padding included."""
    slots_BN = mask.query_positions_BN
    if mask.padding_B is not None:
        slots_BN = slots_BN + mask.padding_B[:, None]
    return {TEXT_SLOTS: slots_BN}


def _take_slots(module: Any) -> None:
    """Its forward goes by the slots of the text where it is given them."""
    kind: Any = type(module)
    if not hasattr(kind.forward, "of_cache"):
        kind.forward = _by_slots(kind.forward)
    # accelerate keeps the forward that stood there before its hooks.
    old = vars(module).get("_old_forward")
    if getattr(old, "__func__", None) is kind.forward.of_cache:
        module._old_forward = MethodType(kind.forward, module)


def _by_slots(forward: Callable[..., Any]) -> Callable[..., Any]:
    def by_slots(self: Any, *args: Any, text_slots: Tensor | None = None, **kwargs: Any) -> Any:
        if text_slots is None or not scales_by_slot(self):
            return forward(self, *args, **kwargs)
        return forward(_Scaled(self, text_slots), *args, **kwargs)

    by_slots.of_cache = forward  # type: ignore[attr-defined]
    return by_slots


class _Scaled:
    """Attention as its forward sees it, whose queries are scaled already: nothing is changed of the
    module, which other threads may run, too."""

    attn_temperature_tuning = False

    def __init__(self, module: Any, slots_BN: Tensor) -> None:
        self._module, self._slots_BN = module, slots_BN

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def q_proj(self, hidden_BNX: Tensor) -> Tensor:
        """The queries, as the model itself would scale them. It does so right behind this matrix,
        as queries without positions are neither turned nor normalised."""
        its = self._module
        query_BNX: Tensor = its.q_proj(hidden_BNX)
        slots_BN = self._slots_BN.to(query_BNX.device)
        times_BN = torch.log1p(torch.floor((slots_BN.float() + 1.0) / its.floor_scale))
        scales_BN1 = (times_BN * its.attn_scale + 1.0)[..., None]
        return (query_BNX * scales_BN1).to(query_BNX.dtype)
