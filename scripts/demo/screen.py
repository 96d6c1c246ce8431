"""What the demo says: its plan before, its result behind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from scripts.demo.plan import Plan, in_words
from scripts.demo.recipe import ALONE, COPYING, FASTEST, PROVEN, TOGETHER, Recipe


def show_plan(
    console: Console,
    recipe: Recipe,
    plan: Plan,
    stages: Sequence[tuple[str, str, float | None]],
) -> None:
    """The first screen: what is about to happen, and how long it takes.

    Args:
        console: to print on.
        recipe: of the demo.
        plan: for this machine.
        stages: name, purpose and expected seconds; no seconds where an earlier run's is reused.
    """
    console.print(
        Panel(
            "A language model writes one token per forward pass. Extra heads guess several more at "
            "once; the model checks all guesses in its next pass and keeps those it would have "
            "written itself. The text stays the same, the passes become fewer.\n\n"
            f"Everything is in this repository; results go to {recipe.folder}. Times are for this "
            "machine as busy as it is now.",
            title="medusa-heads demo",
        )
    )
    for doing, chosen in (("training", recipe.train), ("decoding", recipe.decode)):
        console.print(f"{doing} in {chosen.reason}", highlight=False)
    table = Table()
    for column in ("stage", "what it does", "takes about"):
        table.add_column(column, no_wrap=column != "what it does")
    for number, (name, purpose, seconds) in enumerate(stages, start=1):
        takes = "reused" if seconds is None else in_words(seconds)
        table.add_row(f"{number} {name}", purpose, takes)
    console.print(table)
    for line in shortened(recipe, plan):
        console.print(line, highlight=False)
    if reused := [name for name, _, seconds in stages if seconds is None]:
        console.print(
            f"Nothing has changed since an earlier run: {' and '.join(reused)} reused. "
            f"To start anew, remove {recipe.folder} and run the demo again."
        )


def shortened(recipe: Recipe, plan: Plan) -> list[str]:
    """What was cut to keep the time, and where the time is not kept."""
    amounts, full, lines = plan.amounts, recipe.full, []
    if amounts != full:
        lines.append(
            f"To end in about {in_words(recipe.budget)} here, the heads learn from "
            f"{amounts.rows:,} pieces of text in place of {full.rows:,}, and {amounts.prompts} "
            f"prompts are measured in place of {full.prompts}: with more text they guess better."
        )
    if plan.seconds > recipe.budget and amounts == recipe.floor:
        lines[-1:] = [
            f"This is the least text that the heads need ({amounts.rows:,} pieces of {full.rows:,},"
            f" {amounts.prompts} prompts of {full.prompts}): on this machine, as busy as it is now,"
            f" it takes {in_words(plan.seconds)}."
        ]
    return lines


def show_result(console: Console, recipe: Recipe, *, reread: bool) -> None:
    """The tables of an earlier run, then what they say and where everything lies."""
    from medusa_heads.inference.bench.report import tables

    report = json.loads(recipe.report_file.read_text(encoding="utf-8"))
    if reread:
        console.print(f"Measured {report['created']}:")
        console.print(*tables(report))
    for line in findings(report):
        console.print(line)
    for name, path in (
        ("heads", recipe.heads),
        ("numbers", recipe.report_file),
        ("picture", recipe.folder / "report.png"),
    ):
        console.print(f"{name:>8}: {path}", highlight=False)
    console.print(
        f'Try them: .venv/bin/medusa-heads generate {recipe.heads} --prompt "def main():"',
        highlight=False,
        soft_wrap=True,
    )


def findings(report: Mapping[str, Any]) -> list[str]:
    """The heads' own share of the speed apart from that of copying; and the proof in a line."""
    lines = []
    for setting in report["settings"]:
        found = {method["name"]: method for method in setting["methods"]}
        times = {name: f"{method['speedup']:.2f}x" for name, method in found.items()}
        if ALONE in found:
            tokens = found[ALONE]["tokens_per_step"]
            lines.append(
                f"{setting['dtype']}, {setting['name']}: the heads alone write {tokens:.2f} tokens "
                f"a step, {times[ALONE]} the speed of {setting['reference']}."
            )
        if FASTEST in found:
            nodes = found[FASTEST]["nodes"]
            lines.append(
                f"    By the tree that should be fastest here, of {nodes} nodes: "
                f"{found[FASTEST]['tokens_per_step']:.2f} tokens a step, {times[FASTEST]}."
                if nodes
                else f"    No tree of theirs should be faster here than none: {times[FASTEST]}."
            )
        if {COPYING, TOGETHER} <= found.keys():
            lines.append(
                f"    Copying what followed earlier in the text, without heads: {times[COPYING]}. "
                f"Both, chosen at every step: {times[TOGETHER]}."
            )
        if setting["dtype"] == "float32" and (proven := PROVEN[setting["name"]]) in found:
            same = round(found[proven]["identical"] * setting["prompts"])
            lines.append(
                f"fp32, {setting['name']}: with heads, {same} of {setting['prompts']} texts are "
                "token for token those of transformers' generate."
            )
    return lines
