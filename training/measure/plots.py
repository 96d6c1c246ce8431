"""The pictures of a training report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Okabe and Ito's palette: told apart with every kind of colour vision, and in grey.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f")


def draw_plots(folder: Path, report: Mapping[str, Any]) -> list[Path]:
    """Write `tokens_per_step.png`, `accuracy.png` and `reliability.png`; returns their paths.

    A report without calibration has no `reliability.png`.
    """
    plots: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
        "tokens_per_step.png": _tokens_per_step,
        "accuracy.png": _accuracy,
    }
    if report["calibration"]:
        plots["reliability.png"] = _reliability
    return [_save(folder / name, draw, report) for name, draw in plots.items()]


def _save(
    path: Path, draw: Callable[[Any, Mapping[str, Any]], None], report: Mapping[str, Any]
) -> Path:
    from matplotlib.figure import Figure  # drawn without a display: no pyplot

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    draw(figure, report)
    staged = path.with_name(f".{path.stem}.{os.getpid()}.png")
    try:
        figure.savefig(staged, dpi=150)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    return path


def _tokens_per_step(figure: Any, report: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    static, dynamic = report["static_trees"], report["dynamic_trees"]
    lines = [
        ("static, walked as decoding walks", static, "tokens_per_step", "-"),
        ("static, at any position", static, "tokens_per_step_anywhere", "--"),
        ("dynamic, at any position", dynamic, "tokens_per_step_anywhere", "--"),
    ]
    colours = (COLOURS[0], COLOURS[0], COLOURS[1])
    for (label, trees, value, style), colour in zip(lines, colours, strict=True):
        if trees:
            nodes = [tree["nodes"] for tree in trees]
            axes.plot(
                nodes, [t[value] for t in trees], style, marker="o", label=label, color=colour
            )
    axes.set_xlabel("drafted nodes")
    axes.set_ylabel("tokens per step")
    axes.set_title("Tokens per forward of the target (simulated; plain decoding: 1)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _accuracy(figure: Any, report: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    heads = [entry["head"] for entry in report["accuracy"]]
    ranks = len(report["accuracy"][0]["top_k"])
    for k in range(ranks):
        values = [entry["top_k"][k] for entry in report["accuracy"]]
        axes.plot(heads, values, marker="o", label=f"top-{k + 1}", color=COLOURS[k])
    labels = [f"head {entry['head']}\n{entry['looks_ahead']} ahead" for entry in report["accuracy"]]
    axes.set_xticks(heads, labels, fontsize=9)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of held-out positions")
    axes.set_title("The true token among a head's best guesses", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _reliability(figure: Any, report: Mapping[str, Any]) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    for axes, moment, title in zip(
        panels, ("before", "after"), ("as trained", "with temperatures"), strict=True
    ):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
        for entry in report["calibration"]:
            bins = entry[moment]["bins"]
            axes.plot(
                [part["confidence"] for part in bins],
                [part["accuracy"] for part in bins],
                marker=".",
                label=f"head {entry['head']}: error {entry[moment]['expected_error']:.3f}",
                color=COLOURS[entry["head"] % len(COLOURS)],
            )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("confidence")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper left")
    panels[0].set_ylabel("share of best guesses that were right")
