"""vLLM's own layout (up to 0.32), and the same behind the prefix `medusa_heads.`, which it strips.

`blocks.{i}.layers.{l}.weight`, `.bias`, `lm_heads.{i}.weight`; or one `lm_head.weight` (also as
`lm_heads.0.weight`) where the configuration says `original_lm_head`. Of a reduced vocabulary
`token_map` holds the token ids, and `truncated_vocab_size` their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS
from medusa_heads.checkpoint.vocab_matrix import VOCAB_MATRIX_KEY
from medusa_heads.interop.layout import Layout, claim
from medusa_heads.interop.outgoing import Outgoing, save
from medusa_heads.interop.source import Source

WEIGHTS_FILE = "model.safetensors"
PREFIX = "medusa_heads."
_NUMBER = "(0|[1-9][0-9]{0,5})"
_BLOCK = re.compile(rf"blocks\.{_NUMBER}\.layers\.{_NUMBER}\.(weight|bias)")
_HEAD = re.compile(rf"lm_heads\.{_NUMBER}\.weight")


def recognise(names: Iterable[str]) -> bool:
    """Whether tensors of these names are in this layout."""
    return any(_BLOCK.fullmatch(name.removeprefix(PREFIX)) for name in names)


def find(source: Source) -> Layout:
    """Which tensor is which.

    Raises:
        ValueError: a tensor that has no place here, or a matrix too few.
    """
    claims = claim(
        source.config,
        num_heads="num_heads",
        num_layers="num_hidden_layers",
        hidden_size="hidden_size",
        vocab_size="vocab_size",
        draft_vocab_size="truncated_vocab_size",
    )
    blocks: dict[str, str] = {}
    matrices: dict[str, str] = {}
    token_map = None
    for theirs in source.files:
        name = theirs.removeprefix(PREFIX)
        if block := _BLOCK.fullmatch(name):
            blocks[f"{block[1]}.{block[2]}.linear.{block[3]}"] = theirs
        elif name == "token_map":
            token_map = theirs
        elif name == "lm_head.weight" or _HEAD.fullmatch(name):
            matrices[name] = theirs
        else:
            raise ValueError(f"{source.name!r}: {theirs} is no tensor of vLLM's layout")
    layout = Layout(blocks, token_map=token_map, claims=claims)
    if token_map is None and "draft_vocab_size" in claims:
        # Without a map it is but the vocabulary's size once more.
        layout.claims = {ours: said for ours, said in claims.items() if ours != "draft_vocab_size"}
    _place_matrices(source, layout, matrices)
    if not source.config.get("medusa_fc_bias", False) and any(".bias" in name for name in blocks):
        layout.notices.append(
            "config.json does not say medusa_fc_bias: true, without which vLLM leaves the biases "
            "out: they are kept"
        )
    return layout


def _place_matrices(source: Source, layout: Layout, matrices: dict[str, str]) -> None:
    shared = bool(source.config.get("original_lm_head", False))
    heads = {name.split(".")[0] for name in layout.names}
    own = {name: theirs for name, theirs in matrices.items() if name != "lm_head.weight"}
    if shared and not (len(own) == len(heads) > 1):
        layout.matrix = matrices.get("lm_head.weight", matrices.get(VOCAB_MATRIX_KEY))
        surplus = set(own) - {VOCAB_MATRIX_KEY}
        if layout.matrix is None or surplus:
            raise ValueError(
                f"{source.name!r}: config.json says original_lm_head, expected lm_head.weight "
                f"alone, got {sorted(matrices) or 'no matrix'}"
            )
        return
    if not own:
        raise ValueError(
            f"{source.name!r} holds no lm_heads, and config.json does not say original_lm_head: "
            "true: correct it if the heads share the target's matrix"
        )
    num_layers = len({name.split(".")[1] for name in layout.names})
    for name, theirs in own.items():
        layout.names[f"{name.split('.')[1]}.{num_layers}.weight"] = theirs
    if shared:
        layout.notices.append(
            "config.json says original_lm_head, but every head has a matrix: they are kept"
        )


def write(folder: Path, outgoing: Outgoing) -> None:
    """The layout with every key that vLLM reads, so that none of its defaults plays a part.

    Raises:
        ValueError: heads that vLLM cannot hold, or a vocabulary matrix that is not at hand.
        OSError: the folder cannot be written.
    """
    outgoing.require_plain("vLLM", reduced=True)
    config = outgoing.config
    tensors = {}
    for name, tensor in outgoing.stored.tensors.items():
        if name == DRAFT_TOKENS:
            tensors["token_map"] = tensor
            continue
        head, place, part = name.split(".", 2)
        if part.startswith("linear."):
            tensors[f"blocks.{head}.layers.{place}.{part.removeprefix('linear.')}"] = tensor
        else:
            tensors[f"lm_heads.{head}.weight"] = tensor
    if outgoing.shared:
        matrix_VD = outgoing.matrix_VD()
        drafted = tensors.get("token_map")
        tensors["lm_head.weight"] = matrix_VD if drafted is None else matrix_VD[drafted]
        if drafted is not None:
            outgoing.notices.append(
                "vLLM reads a token_map only with model_loader_extra_config="
                '{"enable_weights_track": False}; --full_vocabulary does without'
            )
    # No other key with "num" and "heads" or "layers" in it: vLLM would take it for these two.
    values = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": outgoing.shared,
        "truncated_vocab_size": config.num_candidates,
        "base_model_name_or_path": outgoing.stored.target.get("name_or_path"),
    }
    save(folder, WEIGHTS_FILE, tensors, values)
