"""The layouts of other projects as tables of names: which tensor of a foreign checkpoint is which
of ours, before any value is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from medusa_heads.config import HeadsConfig, HeadsKind
from medusa_heads.interop import ReadFormat, block, eagle3
from medusa_heads.interop.said import number_said
from medusa_heads.interop.source import Source
from medusa_heads.settings import MOST

_N = "(0|[1-9][0-9]{0,5})"
_OWN = rf"{_N}\.{_N}\.(.+)"
_OWN_WORDS = "{head}.{block}.linear.weight and so on"
_VLLM = r"(?:medusa_heads\.)?"  # vLLM strips it


@dataclass
class Layout:
    """What was found in a source, its tensors by the names they have there."""

    names: dict[str, str]  # of the heads' tensors, by ours
    claims: dict[str, tuple[str, int]]  # key and value of its configuration, by our field
    matrix: str | None = None  # [V, D], which all heads share
    token_map: str | None = None  # token ids of a reduced vocabulary
    whole_model: bool = False  # the target lies there too
    kind: HeadsKind = "medusa"
    raw_embeddings: bool = False
    notices: list[str] = field(default_factory=list)  # what the user should know


@dataclass(frozen=True)
class Format:
    """A layout."""

    mark: str  # what a name looks like by which the layout is known
    names: Mapping[str, str]  # what names look like, and ours; `out`: behind the last block
    stranger: str  # said of a name that looks like none of them
    keys: Mapping[str, str]  # our fields, and the keys of config.json that say them
    section: str | None = None  # of config.json, where the keys lie in one
    prefix: str = ""  # of the heads' names among those of their target
    marks: tuple[str, ...] = ()  # keys of that model's configuration that speak of its heads
    finish: Callable[[Source, Layout], None] | None = None  # what tables cannot say

    def recognises(self, source: Source) -> bool:
        return any(re.fullmatch(self.mark, name) for name in source.files)

    def our_name(self, theirs: str) -> str | None:
        """Of a tensor; None for one that has no place here."""
        found = ((re.fullmatch(pattern, theirs), ours) for pattern, ours in self.names.items())
        return next((match.expand(ours) for match, ours in found if match), None)


def _finish_vllm(source: Source, layout: Layout) -> None:
    if layout.token_map is None:  # then it is but the vocabulary's size once more
        layout.claims.pop("draft_vocab_size", None)
    heads = {ours.split(".")[0] for ours in layout.names if ".linear." in ours}
    own = [ours for ours in layout.names if ".out." in ours]
    shared = bool(source.config.get("original_lm_head", False))
    if shared and not len(own) == len(heads) > 1:
        got = sorted(filter(None, [layout.matrix, *(layout.names[ours] for ours in own)]))
        first = layout.names.pop("0.out.weight", None)
        layout.matrix = layout.matrix or first
        if layout.matrix is None or set(own) - {"0.out.weight"}:
            raise ValueError(
                f"{source.name!r}: config.json says original_lm_head, expected lm_head.weight "
                f"alone, got {got or 'no matrix'}"
            )
    elif not own:
        raise ValueError(
            f"{source.name!r} holds no lm_heads, and config.json does not say original_lm_head: "
            "true: correct it if the heads share the target's matrix"
        )
    else:
        layout.matrix = None
        if shared:
            layout.notices.append(
                "config.json says original_lm_head, but every head has a matrix: they are kept"
            )
    biases = any(ours.endswith(".bias") for ours in layout.names)
    if biases and not source.config.get("medusa_fc_bias", False):
        layout.notices.append(
            "config.json does not say medusa_fc_bias: true, without which vLLM leaves the biases "
            "out: they are kept"
        )


_OTHER_HYDRAS = {
    "prefix-mlp": "a decoder layer of the target's kind before the heads",
    "cross-attn": "a decoder layer that attends to the target's hidden states",
    "eagle-attn": "an EAGLE layer in place of heads",
}


def _finish_hydra(source: Source, layout: Layout) -> None:
    arch = source.config.get("hydra_head_arch", "mlp")
    if arch != "mlp":
        raise ValueError(
            f"{source.name!r} holds Hydra heads of architecture {arch!r} "
            f"({_OTHER_HYDRAS.get(str(arch), 'unknown')}), which heads here cannot hold: only "
            "'mlp' can"
        )
    offset = source.config.get("hidden_state_offset", 0)
    if offset != 0:
        raise ValueError(
            f"{source.name!r} holds Hydra heads that read layer -{offset} of the target "
            "(hidden_state_offset): heads here read its last hidden state"
        )
    if all(int(place) % 2 for place in _places(layout)):  # behind dropout, which holds no tensor
        halved = {}
        for ours, theirs in layout.names.items():
            head, place, part = ours.split(".", 2)
            place = place if place == "out" else str(int(place) // 2)
            halved[f"{head}.{place}.{part}"] = theirs
        layout.names = halved
    # Ungrounded heads see no tokens: they are Medusa's, with a bias behind.
    grounded = any(ours.endswith("res_connection.weight") for ours in layout.names)
    layout.raw_embeddings = grounded
    layout.kind = "hydra" if grounded else "medusa"
    said = source.config.get("grounded_heads")
    if said is not None and bool(said) != grounded:
        layout.notices.append(
            f"config.json says grounded_heads: {said}, the weights say otherwise: taken from the "
            "weights"
        )


_FASTERDECODING_KEYS = {
    "num_heads": "medusa_num_heads",
    "num_layers": "medusa_num_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
}
# v0.1 has a matrix in each head; in v2 they share the target's, of which a copy may lie beside
# them. TGI and LoRAX read the same.
_FASTERDECODING = Format(
    mark=_OWN,
    names={_OWN: r"\1.\2.\3", r"lm_heads\.0\.weight|lm_head\.weight": "matrix"},
    stranger=f"is no tensor of FasterDecoding's layout ({_OWN_WORDS})",
    keys=_FASTERDECODING_KEYS,
)
FORMATS: dict[ReadFormat, Format] = {
    "fasterdecoding": _FASTERDECODING,
    "tgi": _FASTERDECODING,
    "lorax": _FASTERDECODING,
    # Up to 0.32. One `lm_head.weight` (or `lm_heads.0.weight`) where all heads share it.
    "vllm": Format(
        mark=rf"{_VLLM}blocks\.{_N}\.layers\.{_N}\.(weight|bias)",
        names={
            rf"{_VLLM}blocks\.{_N}\.layers\.{_N}\.(weight|bias)": r"\1.\2.linear.\3",
            rf"{_VLLM}lm_heads\.{_N}\.weight": r"\1.out.weight",
            rf"{_VLLM}lm_head\.weight": "matrix",
            rf"{_VLLM}token_map": "token_map",
        },
        stranger="is no tensor of vLLM's layout",
        keys={
            "num_heads": "num_heads",
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "vocab_size": "vocab_size",
            "draft_vocab_size": "truncated_vocab_size",
        },
        finish=_finish_vllm,
    ),
    "modelopt": Format(
        mark=r"medusa_heads\.[0-9]+\..*",
        names={rf"medusa_heads\.{_OWN}": r"\1.\2.\3"},
        stranger=f"is no tensor of this layout (medusa_heads.{_OWN_WORDS})",
        keys={"num_heads": "num_medusa_heads", "num_layers": "num_medusa_layers"},
        section="medusa",
        prefix="medusa_heads.",
        marks=("medusa",),
    ),
    # FasterDecoding 1.0 (Medusa-2), whose target was trained together with the heads: it is the one
    # in the same files, whatever base model the configuration names.
    "merged": Format(
        mark=r"medusa_head\..*",
        names={rf"medusa_head\.{_OWN}": r"\1.\2.\3"},
        stranger=f"is no tensor of this layout (medusa_head.{_OWN_WORDS})",
        keys=_FASTERDECODING_KEYS,
        prefix="medusa_head.",
        marks=("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"),
    ),
    # Ankner et al. 2024, arXiv:2402.05109, and their published code. Where dropout stood before
    # each layer, blocks count 1, 3, .. and a matrix has a 1 behind it.
    "hydra": Format(
        mark=r"hydra_(mlp|lm_head)\..*",
        names={
            rf"hydra_mlp\.{_N}\.{_N}\.((?:linear|res_connection)\.(?:weight|bias))": r"\1.\2.\3",
            rf"hydra_lm_head\.{_N}\.(?:1\.)?(weight|bias)": r"\1.out.\2",
        },
        stranger="is no tensor of Hydra's 'mlp' architecture, the only one of its that heads here "
        "can hold",
        keys={"num_heads": "hydra_num_heads", "num_layers": "hydra_num_layers"},
        finish=_finish_hydra,
    ),
    # Layers and no heads: read and written in files of their own, `DECODERS`.
    "eagle3": Format(mark=eagle3.MARK, names={}, stranger="", keys={}),
    "dflash": Format(mark=block.DFLASH_MARK, names={}, stranger="", keys={}),
    "dspark": Format(mark=block.DSPARK_MARK, names={}, stranger="", keys={}),
}


_Read = tuple[HeadsConfig, dict[str, Tensor], list[str]]
_ReadDecoder = Callable[[Source, int | None, int | None], _Read]
DECODERS: dict[ReadFormat, _ReadDecoder] = {
    "eagle3": eagle3.read,
    "dflash": partial(block.read, corrected=False),
    "dspark": partial(block.read, corrected=True),
}


def find(source: Source, name: ReadFormat) -> Layout:
    """Which tensor of the source is which, in the layout `name`. Raises ValueError: a tensor of the
    heads has no place in it."""
    form = FORMATS[name]
    found = {theirs: form.our_name(theirs) for theirs in source.files}
    names = {ours: theirs for theirs, ours in found.items() if ours}
    strangers = [theirs for theirs, ours in found.items() if not ours]
    layout = Layout(
        names,
        _claims(source.config, form),
        names.pop("matrix", None),
        names.pop("token_map", None),
        whole_model=bool(form.prefix and strangers),
    )
    if form.finish:
        form.finish(source, layout)
    if strange := next((name for name in strangers if name.startswith(form.prefix)), None):
        raise ValueError(f"{source.name!r}: {strange} {form.stranger}")
    behind = len(_places(layout))
    layout.names = {n.replace(".out.", f".{behind}."): theirs for n, theirs in layout.names.items()}
    used = {*layout.names.values(), layout.matrix, layout.token_map}
    if not layout.whole_model and (unused := sorted(set(source.files) - used)):
        raise ValueError(
            f"{source.name!r}: {unused[0]} stands where another tensor does: leave one of them out"
        )
    return layout


def without_heads(source: Source) -> tuple[list[str], dict[str, Any]]:
    """The names of a whole model's tensors, and its configuration, without what they hold of heads
    that lie in it."""
    there = [form for form in FORMATS.values() if form.prefix and form.recognises(source)]
    prefixes = tuple(form.prefix for form in there)
    marks = {key for form in there for key in form.marks}
    names = [name for name in source.files if not name.startswith(prefixes)]
    return names, {key: said for key, said in source.config.items() if key not in marks}


def _places(layout: Layout) -> set[str]:
    return {ours.split(".")[1] for ours in layout.names} - {"out"}


def _claims(config: Mapping[str, Any], form: Format) -> dict[str, tuple[str, int]]:
    said = config.get(form.section, {}) if form.section else config
    if not isinstance(said, dict):
        raise ValueError(f"config.json: {form.section} must be an object, got {said!r}")
    return {
        ours: (key, number_said(key, said[key], 1, MOST))
        for ours, key in form.keys.items()
        if said.get(key) is not None
    }
