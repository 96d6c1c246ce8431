"""Hydra's layout: `hydra_mlp.{i}.{l}.linear.*`, where the first block of head i reads the hidden
state and i + 1 token embeddings and has a `res_connection`; `hydra_lm_head.{i}.weight`, `.bias`.
Where dropout stood before each layer, l counts 1, 3, .. and it is `hydra_lm_head.{i}.1.weight`.

Source: Ankner et al. 2024, arXiv:2402.05109, and their published code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from medusa_heads.interop.layout import Layout, claim
from medusa_heads.interop.source import Source

_NUMBER = "(0|[1-9][0-9]{0,5})"
_BLOCK = re.compile(
    rf"hydra_mlp\.{_NUMBER}\.{_NUMBER}\.((?:linear|res_connection)\.(?:weight|bias))"
)
_OUT = re.compile(rf"hydra_lm_head\.{_NUMBER}\.(?:1\.)?(weight|bias)")
_OTHERS = {
    "prefix-mlp": "a decoder layer of the target's kind before the heads",
    "cross-attn": "a decoder layer that attends to the target's hidden states",
    "eagle-attn": "an EAGLE layer in place of heads",
}


def recognise(names: Iterable[str]) -> bool:
    """Whether tensors of these names are in this layout, or of Hydra's other architectures."""
    return any(name.startswith(("hydra_mlp.", "hydra_lm_head.")) for name in names)


def find(source: Source) -> Layout:
    """Which tensor is which.

    Raises:
        ValueError: another architecture of Hydra's than "mlp", or a tensor without a place in it.
    """
    arch = source.config.get("hydra_head_arch", "mlp")
    if arch != "mlp":
        raise ValueError(
            f"{source.name!r} holds Hydra heads of architecture {arch!r} "
            f"({_OTHERS.get(str(arch), 'unknown')}), which heads here cannot hold: only 'mlp' can"
        )
    offset = source.config.get("hidden_state_offset", 0)
    if offset != 0:
        raise ValueError(
            f"{source.name!r} holds Hydra heads that read layer -{offset} of the target "
            "(hidden_state_offset): heads here read its last hidden state"
        )
    blocks: dict[tuple[str, int, str], str] = {}
    names: dict[str, str] = {}
    for theirs in source.files:
        if block := _BLOCK.fullmatch(theirs):
            blocks[block[1], int(block[2]), block[3]] = theirs
        elif not _OUT.fullmatch(theirs):
            raise ValueError(
                f"{source.name!r}: {theirs} is no tensor of Hydra's 'mlp' architecture, the only "
                "one of its that heads here can hold"
            )
    places = {place for _, place, _ in blocks}
    step = 2 if all(place % 2 for place in places) else 1  # behind dropout, which holds no tensor
    for (head, place, part), theirs in blocks.items():
        names[f"{head}.{place // step}.{part}"] = theirs
    for theirs in source.files:
        if out := _OUT.fullmatch(theirs):
            names[f"{out[1]}.{len(places)}.{out[2]}"] = theirs
    # Ungrounded heads see no tokens: they are Medusa's, with a bias behind.
    grounded = any(name.endswith("res_connection.weight") for name in names)
    layout = Layout(
        names,
        kind="hydra" if grounded else "medusa",
        claims=claim(source.config, num_heads="hydra_num_heads", num_layers="hydra_num_layers"),
    )
    layout.raw_embeddings = grounded
    said = source.config.get("grounded_heads")
    if said is not None and bool(said) != grounded:
        layout.notices.append(
            f"config.json says grounded_heads: {said}, the weights say otherwise: taken from the "
            "weights"
        )
    return layout
