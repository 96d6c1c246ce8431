"""The proof of tokens, as a section of a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from textwrap import fill

from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.machine.facts import machine_facts
from medusa_heads.tables import in_markdown
from scripts.prove.lossless.cases import Record
from scripts.prove.lossless.comparison import EPSILON
from scripts.prove.lossless.records import Summary

TITLE = "Tokens: fp32 text equals `generate()`"
INTRODUCTION = """Text is decoded in fp32 and compared token by token with transformers' own
`generate()`: greedy, and sampled with the same seed. Targets are the demo's, on real programs, and
a tiny random one of every causal-LM architecture that is decoded with drafts. Batches of 8 have
rows of unlike lengths that end apart. A batch draws from one stream of random numbers, which
`generate()` reads row by row; so its rows are kept in step, or each row draws numbers of its own,
by seed, row and place. The true continuation is planted on branches of the drafted trees among
false ones, so that deep paths, rejections in the middle of a tree and moves in the cache all
happen. Drafts that are drawn are accepted by rejection, which keeps the law and not the text:
sampled text is not compared
there, but [counted](sampling.md)."""
_FIGURES = ("tokens", "mismatches", "ties", "tokens per step")
_NOTICED = ("broken engines", "noticed", "of these by an error")
FAULTS_SAY = """The same texts were decoded by engines broken in one place each. A fault must show
as a difference, or as an error."""


def section(summary: Summary, command: str, asked: int) -> str:
    """Markdown with the figures, and with what made them; `asked` tokens were to be compared."""
    facts = machine_facts()
    sha = (provenance()["git_sha"] or "unknown")[:7]
    made = (
        f"`{command}`: {datetime.now(timezone.utc).date()}, revision {sha}, {facts['cpu']}, "
        f"{facts['capability']} ({', '.join(facts['instructions'])}), torch {facts['torch']}, "
        f"transformers {facts['transformers']}."
    )
    gaps = f", at most {max(summary.gaps):.1e} apart" if summary.gaps else ""
    left_out = ", ".join(f"{count} {why}" for why, count in sorted(summary.left_out.items()))
    noticed = len(summary.broken) - len(summary.unnoticed)
    seconds = sum(record.seconds for record in summary.records)
    result = (
        f"**{summary.tokens:,} tokens compared, {summary.mismatches:,} mismatches, "
        f"{len(summary.gaps)} ties{gaps}; {noticed:,} of {len(summary.broken):,} faults noticed.** "
        f"{summary.targets} targets ({left_out or 'none'} left out), {seconds / 60:.0f} minutes. A "
        f"tie is a text that goes on with the other of the two best tokens, where these are less "
        f"than {EPSILON:g} standard deviations of the logits apart."
    )
    if summary.tokens < asked:
        result += f" The run was stopped before the {asked:,} tokens that it was asked for."
    parts = [_filled(INTRODUCTION), _filled(made), _filled(result)]
    parts += [_table("texts", summary.compared, lambda record: record.group, _FIGURES, _figures)]
    parts += [_table("drafts", summary.compared, lambda record: record.family, _FIGURES, _figures)]
    parts += [_filled(FAULTS_SAY)]
    parts += [_table("fault", summary.broken, lambda record: record.fault, _NOTICED, _noticed)]
    if summary.unnoticed:
        names = sorted(f"{record.case}" for record in summary.unnoticed)
        parts.append("Unnoticed:\n\n" + "\n".join(f"- {name}" for name in names))
    if wrong := [r for r in summary.compared if r.mismatches] + summary.failed:
        parts.append("Wrong:\n\n" + "\n".join(f"- {r.case}: {r.where} {r.failed}" for r in wrong))
    return "\n\n".join(parts) + "\n"


def write_section(page: Path, title: str, text: str) -> None:
    """Put a section into a page, in place of the one with the same title."""
    content = page.read_text(encoding="utf-8") if page.exists() else "# Proofs\n"
    written = f"## {title}\n\n{text}"
    own = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.M | re.S)
    if own.search(content):
        content = own.sub(lambda _: written + "\n", content, count=1)
    else:
        content = f"{content.rstrip()}\n\n{written}"
    page.write_text(content.rstrip() + "\n", encoding="utf-8")


def _table(
    title: str,
    records: Iterable[Record],
    key: Callable[[Record], str | None],
    columns: Sequence[str],
    figures: Callable[[Sequence[Record]], list[str]],
) -> str:
    """A line for each group of records."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(key(record)), []).append(record)
    cells = [[name, *figures(groups[name])] for name in sorted(groups)]
    return in_markdown(([title, *columns], cells))


def _figures(records: Sequence[Record]) -> list[str]:
    tokens = sum(record.tokens for record in records)
    steps = sum(record.tokens / record.tokens_per_step for record in records if record.tokens)
    wrong = sum(record.mismatches for record in records)
    ties = sum(record.ties for record in records)
    return [f"{tokens:,}", f"{wrong:,}", str(ties), f"{tokens / max(steps, 1e-9):.2f}"]


def _noticed(records: Sequence[Record]) -> list[str]:
    caught = [record.caught for record in records]
    return [f"{n:,}" for n in (len(caught), sum(map(bool, caught)), caught.count("error"))]


def _filled(text: str) -> str:
    return fill(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False)
