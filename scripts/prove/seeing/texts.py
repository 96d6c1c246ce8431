"""Texts behind prompts with images, token by token against those of `generate()`.

python -m scripts.prove.seeing.texts
python -m scripts.prove.seeing.texts --kinds gemma3 qwen3_vl

Tiny random models in fp32; the true continuation is planted on branches of the drafted trees, or in
chains where a target has a recurrent state. As a control the prompt's images are left out, and
where images take fewer positions than tokens, positions go on as if they did not: either must
change the text.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from medusa_heads.cli.flags.arguments import command
from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.settings import flag
from medusa_heads.target.target import TargetModel
from scripts.prove.seeing.models import KINDS, build, prompts
from tests.inference.planted import BUSHY, PlantedDrafter, decoding

CHAIN = [(0,), (0, 0), (0, 0, 0)]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "temperature": 0.9, "top_k": 0},
}
_COLUMNS = {
    "type": "{kind}",
    "verdict": "{verdict}",
    "tokens": "{tokens:,}",
    "mismatches": "{wrong}",
    "tokens per step": "{per_step:.2f}",
    "controls": "{control}",
}
_AHEAD = "medusa_heads.inference.engine.beginning.positions_ahead"


def both(
    target: TargetModel, inputs: dict[str, Any], new: int, **options: Any
) -> tuple[Tensor, Tensor, GenerationStats]:
    """What `generate()` writes of prompts [B, T], and what is decoded with it planted."""
    model: Any = target.model
    options = {"max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0} | options
    torch.manual_seed(7)
    expected_BT: Tensor = model.generate(**inputs, **options)
    return expected_BT, *planted(target, inputs, expected_BT, **options)


def planted(
    target: TargetModel, inputs: dict[str, Any], expected_BT: Tensor, **options: Any
) -> tuple[Tensor, GenerationStats]:
    """Decode with a text planted in the drafts."""
    model: Any = target.model
    stats, choices = GenerationStats(), BUSHY if capability(target) == "tree" else CHAIN
    truths = expected_BT[:, inputs["input_ids"].shape[1] :].tolist()
    drafter = PlantedDrafter(truths, target.vocab_size, choices)
    custom = decoding(target, drafter, rng="transformers", stats=stats)
    torch.manual_seed(7)
    return model.generate(**inputs, custom_generate=custom, **options), stats


def blind(inputs: dict[str, Any]) -> dict[str, Any]:
    """Prompts without what is given besides tokens."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def as_of_text(moves: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """As if every token of an image took a position."""
    return lambda *given: [0] * len(moves(*given))


@dataclass
class Arguments:
    """What to compare."""

    kinds: list[str] = flag(list(KINDS), f"of {', '.join(KINDS)}")
    new_tokens: int = flag(40, "of each text")
    prompts: int = flag(8, "sets of one row, and of three")

    def __post_init__(self) -> None:
        if unknown := sorted({*self.kinds} - {*KINDS}):
            raise ValueError(f"kinds are {', '.join(KINDS)}, got {unknown}")


def compare(arguments: Arguments) -> None:
    """Print a table."""
    from medusa_heads.inference.engine import beginning
    from medusa_heads.tables import formatted, in_markdown

    torch.set_num_threads(1)  # of models so small
    table, failed = list[dict[str, Any]](), 0
    for kind in arguments.kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = TargetModel(build(kind))
            tokens = wrong = steps = 0
            noticed = True
            for seed in range(arguments.prompts):
                for rows in (1, 3):
                    inputs = prompts(kind, rows, seed)
                    for options in WAYS.values():
                        if rows > 1 and options["do_sample"]:
                            continue  # generate() itself draws other numbers for a row among others
                        expected, got, stats = both(target, inputs, arguments.new_tokens, **options)
                        wrong += int((expected != got).sum())
                        tokens, steps = tokens + stats.tokens, steps + stats.steps
                noticed &= _notices(target, kind, seed, arguments.new_tokens, beginning)
        failed += bool(wrong) or not noticed
        table.append(
            {
                "kind": kind,
                "verdict": "MISMATCH" if wrong else f"exact {capability(target)}",
                "tokens": tokens,
                "wrong": wrong,
                "per_step": tokens / steps,
                "control": "noticed" if noticed else "NOT noticed",
            }
        )
    print(in_markdown(formatted(_COLUMNS, table)))
    if failed:
        raise ValueError(f"{failed} of {len(table)} types are not exact")


def _notices(target: TargetModel, kind: str, seed: int, new: int, beginning: Any) -> bool:
    """Whether the text is another one without the images, and where positions stay as they are."""
    inputs = prompts(kind, 1, seed)
    options = {"max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    model: Any = target.model
    expected_BT = model.generate(**inputs, **options)
    if torch.equal(model.generate(**blind(inputs), **options), expected_BT):
        return False
    if not KINDS[kind]().moves:
        return True
    with patch(_AHEAD, as_of_text(beginning.positions_ahead)):
        got_BT, _ = planted(target, inputs, expected_BT, **options)
    return not torch.equal(got_BT, expected_BT)


main = command("scripts.prove.seeing.texts", compare, __doc__)

if __name__ == "__main__":
    sys.exit(main())
