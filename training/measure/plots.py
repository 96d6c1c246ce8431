"""The pictures of a training report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from medusa_heads.pictures import LIGHT, Line, draw_lines, save_picture

_INCHES = (6.4, 4.0)


def draw_plots(folder: Path, report: Mapping[str, Any]) -> list[Path]:
    """Write `tokens_per_step.png`, `accuracy.png` and, where heads were calibrated,
    `reliability.png`; returns their paths."""
    plots = [("tokens_per_step.png", _tokens_per_step), ("accuracy.png", _accuracy)]
    if report["calibration"]:
        plots.append(("reliability.png", _reliability))
    return [
        save_picture(folder / name, partial(draw, report), size=_INCHES) for name, draw in plots
    ]


def _tokens_per_step(report: Mapping[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    static, dynamic = report["static_trees"], report["dynamic_trees"]
    drawn = [
        ("static, as decoded", static, "tokens_per_step", "-"),
        ("static, anywhere", static, "tokens_per_step_anywhere", "--"),
        ("dynamic, anywhere", dynamic, "tokens_per_step_anywhere", "--"),
    ]
    lines = [
        Line(name, [(tree["nodes"], tree[value]) for tree in trees], style)
        for name, trees, value, style in drawn
        if trees
    ]
    heads = len(report["accuracy"])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("draft tokens of a step (nodes of the tree)")
    axes.set_ylabel("tokens per step")
    title = "Tokens per forward of the target (simulated; plain decoding: 1)"
    draw_lines(axes, lines, title=title, limit=(f"limit of {heads} heads", heads + 1.0))


def _accuracy(report: Mapping[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    accuracy = report["accuracy"]
    lines = [
        Line(f"top-{k + 1}", [(entry["head"], entry["top_k"][k]) for entry in accuracy])
        for k in range(len(accuracy[0]["top_k"]))
    ]
    labels = [f"head {entry['head']}\n{entry['looks_ahead']} ahead" for entry in accuracy]
    axes.set_xticks([entry["head"] for entry in accuracy], labels)
    axes.set_ylabel("share of held-out positions")
    draw_lines(axes, lines, title="The true token among a head's best guesses")


def _reliability(report: Mapping[str, Any], figure: Any) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"before": "as trained", "after": "with temperatures"}
    for axes, (moment, title) in zip(panels, titles.items(), strict=True):
        axes.plot([0, 1], [0, 1], color=LIGHT.ink, linewidth=0.8, linestyle=":")
        for entry in report["calibration"]:
            found = entry[moment]
            axes.plot(
                *([part[name] for part in found["bins"]] for name in ("confidence", "accuracy")),
                marker=".",
                label=f"head {entry['head']}: error {found['expected_error']:.3f}",
                color=LIGHT.colours[entry["head"] % len(LIGHT.colours)],
            )
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", title=title)
        axes.grid(True)
        axes.legend(fontsize=7, loc="upper left")
    panels[0].set_ylabel("share of best guesses that were right")
