"""What other engines can hold of heads, and what they cannot, in a sentence."""

from __future__ import annotations

from medusa_heads.checkpoint.stored_heads import StoredHeads
from medusa_heads.config import HeadsKind
from medusa_heads.decoder_shape import BlockShape
from medusa_heads.interop import WrittenFormat, gguf_file

ENGINES: dict[WrittenFormat, str] = {
    "fasterdecoding": "FasterDecoding's layout",
    "tgi": "TGI",
    "lorax": "LoRAX",
    "vllm": "vLLM",
    "modelopt": "ModelOpt",
    "eagle3": "EAGLE-3's layout",
    "eagle3-speculators": "speculators' layout of EAGLE-3",
    "dflash": "DFlash's layout",
    "dspark": "DSpark's layout",
    "gguf": "llama.cpp",
    "transformers": "transformers' assistant",
}
KINDS: dict[WrittenFormat, tuple[HeadsKind, ...]] = {
    "eagle3": ("eagle3",),
    "eagle3-speculators": ("eagle3",),
    "dflash": ("block",),
    "dspark": ("block",),
    "gguf": ("eagle3", "block"),
    "transformers": ("block",),
}
_HANDED_ON = (
    "bailingmoe3 deepseek4 gemma4 gpt-oss hunyuan-dense hunyuan_vl lfm2 lfm2moe llama mimo2 "
    "minimax-01 minimax-m2 muse-glimmer nanbeige nemotron_h nemotron_h_moe qwen3 qwen35 qwen35moe "
    "qwen3moe qwen3next qwen4exp"
)
HANDED_ON = frozenset(_HANDED_ON.split())
"""Architectures whose layers llama.cpp of October 2026 hands on to drafters, by its own names."""


def check_fits(stored: StoredHeads, to: WrittenFormat) -> None:
    """Raises ValueError, by name, for what an engine cannot hold: sequential heads, a prefix
    layer, features, a vocabulary matrix with a bias, ..."""
    config, engine = stored.config, ENGINES[to]
    kinds, shared = KINDS.get(to, ("medusa",)), config.vocab_matrix == "shared"
    if config.kind not in kinds:
        train = f"train kind {' or '.join(map(repr, kinds))} for it"
        raise ValueError(f"{engine} holds no {config.kind} heads: {_instead(stored) or train}")
    if config.kind != "medusa":
        _check_layers(stored, to)
        return
    parts = {
        "prefix layer: train without prefix_attention": config.prefix_attention,
        "induction: train without induction": config.induction,
        "linear shortcut: train without linear_shortcut": config.linear_shortcut,
        "features of the target's layers: train without features": config.features,
        "correction by the token before: train without correction_rank": config.correction_rank,
        "bias in the heads' vocabulary matrices": stored.has_vocab_bias,
    }
    if found := [part for part, is_there in parts.items() if is_there]:
        raise ValueError(f"{engine} holds no {found[0]}")
    if config.draft_vocab_size is not None and not (to == "vllm" and shared):
        others = "; --full_vocabulary lets them draft every token" if shared else ""
        raise ValueError(
            f"{engine} cannot hold these heads' reduced vocabulary of "
            f"{config.draft_vocab_size} tokens{others}"
        )
    if to in ("tgi", "lorax") and not stored.target.get("name_or_path"):
        raise ValueError(
            f"{engine} loads the target that the heads name, and they name none: give it"
        )
    if to == "modelopt" and config.num_layers > 1:
        raise ValueError(
            "ModelOpt's checkpoints are read with one block a head, and these heads have "
            f"{config.num_layers}: train num_layers 1 for it"
        )


def _instead(stored: StoredHeads) -> str | None:
    """What to do with heads of a kind that an engine does not hold: to name the layout that is
    theirs, or what keeps them out of that one; None where no layout is for their kind."""
    config = stored.config
    of_blocks: WrittenFormat = "dflash" if config.correction_rank is None else "dspark"
    layouts: dict[str, WrittenFormat] = {"eagle3": "eagle3", "block": of_blocks}
    layout = layouts.get(config.kind)
    if layout is None:
        return None
    try:
        check_fits(stored, layout)
    except ValueError as refusal:
        return str(refusal)
    return f"give --to {layout}"


def _check_layers(stored: StoredHeads, to: WrittenFormat) -> None:
    """Raises ValueError, by name, for what a layout of decoder layers cannot hold."""
    config, engine = stored.config, ENGINES[to]
    if stored.has_vocab_bias:
        raise ValueError(f"{engine} holds no bias in the vocabulary matrix")
    if to != "eagle3" and config.features is None:
        raise ValueError(
            f"{engine} holds layers that read features, and these read the target's last "
            "hidden state: train with features"
        )
    if to == "gguf":
        gguf_file.check_fits(stored)
    if config.kind != "block":
        return
    if to != "gguf" and (to == "dspark") != (config.correction_rank is not None):
        what, other = ("no", "dflash") if to == "dspark" else ("a", "dspark")
        raise ValueError(
            f"these heads have {what} correction by the token before: give --to {other}"
        )
    shape = config.decoder
    assert isinstance(shape, BlockShape)
    if config.correction_rank is None and shape.sample_from_anchor:
        raise ValueError(
            "DFlash drafts nothing from the last known token's query, and these heads do "
            "(sample_from_anchor): train with a correction_rank, and give --to dspark"
        )
    if to == "transformers" and config.draft_vocab_size is not None:
        raise ValueError(
            f"{engine} drafts every token of the target's vocabulary, and these heads a part: "
            "give --full_vocabulary"
        )
    if to != "gguf" and config.vocab_matrix == "own" and config.draft_vocab_size is None:
        raise ValueError(
            f"{engine} reads the target's own vocabulary matrix in place of a whole one: train "
            "vocab_matrix 'shared' for it"
        )
