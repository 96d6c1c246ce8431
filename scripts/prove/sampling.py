"""Proof that sampled text follows the target's own distribution, whatever is drafted.

python -m scripts.prove.sampling --report docs/sampling.md

For each sampling setting the first two and the first three tokens of many texts are drawn through
the tree engine and counted against their exact joint distribution, which the target's own logits
and transformers' own processors give (chi-square, cells of fewer than five expected counts pooled).
The first comes of the prompt and the second of a tree's root; the third often lies behind a draft
that was accepted. A lossy acceptance rule goes through the same test and must fail it. The target
is a tiny random Llama whose heads are its own lm_head, so that drafts are often, but not always,
right.

Shapes: B batch, V vocabulary, C cells.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.cli.flags.arguments import command
from medusa_heads.inference.engine.noise import RNGS, Rng
from medusa_heads.settings import flag
from medusa_heads.tables import in_markdown, on_screen

VOCAB = 16
BATCH = 200
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7, "top_k": 0},
    "temperature 1.5": {"temperature": 1.5, "top_k": 0},
    "top-k 5": {"top_k": 5},
    "top-p 0.8": {"top_p": 0.8, "top_k": 0},
    "min-p 0.1": {"min_p": 0.1, "top_k": 0},
    "repetition penalty 1.5": {"repetition_penalty": 1.5, "top_k": 0},
    "all together": {
        "temperature": 0.9,
        "top_k": 10,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
    },
}
TREES = ("cartesian:3,2", "dynamic:6")
_CASE = ("setting", "tree", "acceptance", "rng")
_COLUMNS = (*_CASE, "two tokens", "three tokens", "tokens per step")


@dataclass
class ProofArguments:
    """How much to draw."""

    samples: int = flag(20_000, "Texts drawn for each setting.")
    seed: int = flag(0, "Seed of the first setting; then one up each.")
    report: str | None = flag(None, "Markdown file to write.")


@dataclass(frozen=True)
class Outcome:
    """One chi-square test."""

    setting: str
    tree: str
    acceptance: str
    rng: str
    tokens: int
    statistic: float
    degrees: int
    p_value: float
    tokens_per_step: float


def work(arguments: ProofArguments) -> int:
    """Draw, test, print; exit code 1 if a setting fails, or the negative control passes."""
    outcomes = prove(arguments.samples, arguments.seed)
    show(outcomes)
    if arguments.report:
        Path(arguments.report).write_text(as_markdown(outcomes, arguments), encoding="utf-8")
    return 0 if verdict(outcomes) else 1


def prove(
    samples: int, seed: int, settings: dict[str, dict[str, Any]] | None = None
) -> list[Outcome]:
    """Every setting with every tree, then the negative control; each draws with a seed of its own,
    so that what one seed happened to draw shows in one case alone."""
    model = tiny_target()
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=2))
    cases: list[tuple[str, str, str, Rng]] = [
        (name, tree, "lossless", rng)
        for rng in reversed(RNGS)
        for name in settings or SETTINGS
        for tree in TREES
    ]
    cases.append(("temperature 0.7", TREES[0], "typical", "transformers"))
    outcomes = []
    for place, case in enumerate(tqdm(cases, desc="chi-square", unit="setting")):
        name, tree, acceptance, rng = case
        torch.manual_seed(seed + place)
        medusa = MedusaModel(model, heads, tree=tree, acceptance=acceptance, rng=rng)
        counts_VVV, tokens_per_step = draw(medusa, samples, SETTINGS[name])
        law_VVV = exact(model, SETTINGS[name])
        for tokens, counts, law in (
            (2, counts_VVV.sum(-1), law_VVV.sum(-1)),
            (3, counts_VVV, law_VVV),
        ):
            statistic, degrees = chi_square(counts.flatten(), law.flatten())
            p_value = upper_tail(statistic, degrees)
            figures = (statistic, degrees, p_value, tokens_per_step)
            outcomes.append(Outcome(name, tree, acceptance, rng, tokens, *figures))
    return outcomes


def tiny_target() -> Any:
    """Random, varied, and with two tokens that are likely again and again."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = LlamaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.generation_config.pad_token_id = 0
    return model


def prompt() -> Tensor:
    return torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def draw(medusa: MedusaModel, samples: int, options: dict[str, Any]) -> tuple[Tensor, float]:
    """How often each beginning of three tokens came up, [V, V, V], and the tokens per step."""
    counts_VVV = torch.zeros(VOCAB, VOCAB, VOCAB)
    ids_BT = prompt().repeat(BATCH, 1)
    steps = tokens = 0
    for _ in range(-(-samples // BATCH)):
        out: Any = medusa.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=5,  # two more than counted, so that all lie inside accepted blocks
            do_sample=True,
            **options,
        )
        places = out[:, ids_BT.shape[1] : ids_BT.shape[1] + 3].unbind(1)
        counts_VVV.index_put_(places, torch.ones(BATCH), accumulate=True)
        steps += medusa.last_stats.steps
        tokens += medusa.last_stats.tokens
    return counts_VVV, tokens / steps


@torch.no_grad()
def exact(model: Any, options: dict[str, Any]) -> Tensor:
    """The joint probability of the first three tokens, [V, V, V]."""
    taken: dict[str, LogitsProcessorList] = {}

    def keep_processors(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> Tensor:
        taken["processors"] = logits_processor
        return input_ids

    ids_1T = prompt()
    model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        custom_generate=keep_processors,
        do_sample=True,
        max_new_tokens=5,
        **options,
    )
    processors = taken["processors"]

    def law(ids_BT: Tensor) -> Tensor:
        scores_BV = model(ids_BT).logits[:, -1]
        rows = [processors(ids_BT[b : b + 1], scores_BV[b : b + 1]) for b in range(len(ids_BT))]  # type: ignore[arg-type]
        return torch.cat(rows).softmax(-1)

    texts_BT, joint_B = ids_1T, torch.ones(1)
    for _ in range(3):
        joint_B = (joint_B[:, None] * law(texts_BT)).flatten()
        next_B1 = torch.arange(VOCAB).repeat(len(texts_BT))[:, None]
        texts_BT = torch.cat([texts_BT.repeat_interleave(VOCAB, dim=0), next_B1], dim=1)
    return joint_B.view(VOCAB, VOCAB, VOCAB)


def chi_square(counts_C: Tensor, probabilities_C: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare cells are pooled into one."""
    impossible_C = probabilities_C == 0
    if counts_C[impossible_C].sum() > 0:
        return float("inf"), 1
    expected_C = probabilities_C * counts_C.sum()
    common_C = expected_C >= 5
    rare = (counts_C[~common_C].sum(), expected_C[~common_C].sum())
    seen = torch.cat([counts_C[common_C], rare[0][None]])
    wanted = torch.cat([expected_C[common_C], rare[1][None]])
    cells = wanted > 0
    statistic = ((seen - wanted).square()[cells] / wanted[cells]).sum()
    return float(statistic), max(int(cells.sum()) - 1, 1)


def upper_tail(statistic: float, degrees: int) -> float:
    """The chance that a chi-square variable is at least so large."""
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


def combined(outcomes: list[Outcome], tokens: int) -> float:
    """One p for all exact cases, which are independent (Fisher 1925): of so many tokens."""
    p_values = [o.p_value for o in outcomes if o.acceptance == "lossless" and o.tokens == tokens]
    return upper_tail(-2 * sum(math.log(p) for p in p_values), 2 * len(p_values))


def verdict(outcomes: list[Outcome]) -> bool:
    """All exact settings hold at 0.1 % (corrected for their number), so do they together, and no
    lossy one does."""
    exact = [o for o in outcomes if o.acceptance == "lossless"]
    lossy = [o for o in outcomes if o.acceptance != "lossless"]
    limit = 0.001 / len(exact)
    if any(o.p_value <= limit for o in exact) or any(o.p_value >= 1e-6 for o in lossy):
        return False
    return all(combined(outcomes, tokens) > 0.001 for tokens in (2, 3))


def show(outcomes: list[Outcome]) -> None:
    Console().print(on_screen("", (_COLUMNS, list(_rows(outcomes)))))
    Console().print(_together(outcomes))
    Console().print("as it should be" if verdict(outcomes) else "[bold red]NOT as it should be")


def as_markdown(outcomes: list[Outcome], arguments: ProofArguments) -> str:
    revision = provenance()["git_sha"] or "unknown"
    lines = [
        "# Sampling follows the target's own distribution",
        "",
        fill(
            f"`python -m scripts.prove.sampling {' '.join(sys.argv[1:])}` ({date.today()}, "
            f"revision {revision[:7]}, torch {torch.__version__}) drew "
            f"{arguments.samples:,} texts for each setting and tree, with a seed of its own. "
            "It compares their first two and first three tokens with the exact "
            "joint distribution. The second token is drawn at the root of the first tree, "
            "before any draft can be accepted; the third often lies behind an accepted draft. The "
            "last row is a lossy rule, which must fail.",
            110,
        ),
        "",
        _together(outcomes),
        "",
        "Of two and of three tokens: p, and in brackets chi-square and its degrees of freedom.",
        "",
        in_markdown((_COLUMNS, list(_rows(outcomes))), texts=len(_CASE)),
    ]
    return "\n".join(lines) + "\n"


def _together(outcomes: list[Outcome]) -> str:
    return (
        f"All lossless cases together (Fisher): p = {combined(outcomes, 2):.2g} for two tokens, "
        f"{combined(outcomes, 3):.2g} for three."
    )


def _rows(outcomes: list[Outcome]) -> Iterator[list[str]]:
    """The tests of two and of three tokens stand one behind the other, and are one row."""
    for two, three in zip(outcomes[::2], outcomes[1::2], strict=True):
        figures = [f"{o.p_value:.3g} ({o.statistic:.1f}, {o.degrees})" for o in (two, three)]
        case = [two.setting, two.tree, two.acceptance, two.rng]
        yield [*case, *figures, f"{two.tokens_per_step:.2f}"]


main = command("scripts.prove.sampling", work, __doc__)

if __name__ == "__main__":
    sys.exit(main())
