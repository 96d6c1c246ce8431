"""What a run has learnt: one dictionary, shown on the screen, as Markdown, and in pictures.

`report.json` holds all of it (`report_version` tells its shape), so that whatever describes the
heads later, such as a model card, needs no other file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from medusa_heads.checkpoint.files import REPORT_FILE as JSON_FILE
from medusa_heads.config import head_offset
from medusa_heads.files import read_json, replace_file, replace_json
from medusa_heads.hub.card import REPORT_VERSION
from medusa_heads.pictures import LIGHT, Line, draw_lines, save_picture
from medusa_heads.tables import Rows, in_markdown, on_screen
from medusa_heads.training.measure.metrics import target_figures
from medusa_heads.trees.statistics import HeadStatistics, simulate_tokens_per_step

MARKDOWN_FILE = "report.md"
SIZES = (1, 3, 7, 11, 15, 16, 23, 31, 32, 47, 63)  # drafted nodes
HEADLINE_SIZE = 32
RANKS = 5
_INCHES = (6.4, 4.0)  # of a picture
LEGEND = (
    "ahead: the token a head predicts, counted from the last one read. T: the temperature its "
    "logits are divided by. ECE: expected calibration error, the mean gap between how sure a head "
    "is and how often it is right, at temperature 1 and at T. walked: along the text, as decoding "
    "goes; anywhere: at random positions."
)


def make_report(
    statistics: HeadStatistics,
    ranks_BTK: Tensor,
    calibrations: Sequence[Mapping[str, Any]],
    *,
    heads: Mapping[str, Any],
    target: str,
    metrics: Mapping[str, Any],
    log: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Everything of a run that is worth telling, as plain values: of statistics, calibrated, of the
    ranks on held-out sequences, of metrics as in `metrics.json`, and of the Trainer's history.
    Static trees are walked over the sequences as decoding would walk them; of dynamic trees is
    known what they gain at any position. Both are given for static trees: compare like with like.
    """
    static = []
    for nodes in SIZES:
        choices = statistics.choices(nodes)
        if len(choices) < nodes:
            break  # the text never went further
        depths = [len(path) for path in choices]
        static.append(
            {
                "nodes": nodes,
                "nodes_by_depth": [depths.count(d + 1) for d in range(statistics.num_heads)],
                "tokens_per_step": simulate_tokens_per_step(ranks_BTK, choices),
                "tokens_per_step_anywhere": statistics.expected_tokens_per_step(nodes),
            }
        )
    best = statistics.choices(HEADLINE_SIZE)
    walked = simulate_tokens_per_step(ranks_BTK, best)
    top_k = zip(*(statistics.top_k_accuracy(k + 1) for k in range(RANKS)), strict=True)
    return {
        "report_version": REPORT_VERSION,
        "target": target,
        "heads": dict(heads),
        "held_out": {
            "positions": statistics.positions,
            "loss": metrics.get("eval_loss"),
            "target": target_figures(metrics),
        },
        "tokens_per_step": {"nodes": len(best), "static": walked},
        "accuracy": [
            {"head": head, "looks_ahead": head_offset(head), "top_k": list(shares)}
            for head, shares in enumerate(top_k)
        ],
        "calibration": list(calibrations),
        "static_trees": static,
        "dynamic_trees": [
            {"nodes": nodes, "tokens_per_step_anywhere": tokens}
            for nodes, tokens in statistics.dynamic_tokens_per_step.items()
        ],
        "tree": [list(path) for path in best],
        "warnings": list(metrics.get("warnings", ())),
        "training": {
            "steps": metrics.get("steps"),
            "best_step": metrics.get("best_step"),
            "seconds": metrics.get("train_runtime"),
            "loss": [[line["step"], line["loss"]] for line in log if "loss" in line],
            "evaluations": [
                {
                    "step": line["step"],
                    "loss": line["eval_loss"],
                    "tokens_per_step": line.get(f"eval_tokens_per_step_{HEADLINE_SIZE}"),
                }
                for line in log
                if "eval_loss" in line
            ],
        },
    }


def write_report(folder: str | os.PathLike[str], report: Mapping[str, Any]) -> None:
    """Write the pictures, `report.md` and `report.json`, in this order: where the numbers are, the
    rest is too."""
    path = Path(folder)
    pictures = draw_plots(path, report)
    replace_file(path / MARKDOWN_FILE, markdown(report, [picture.name for picture in pictures]))
    replace_json(path / JSON_FILE, report, indent=1)


def read_report(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_report` wrote; raises ValueError where it is not there, or of another version."""
    path = Path(folder) / JSON_FILE
    report = read_json(path)
    if report.get("report_version") != REPORT_VERSION:
        raise ValueError(
            f"{str(path)!r} is of report_version {report.get('report_version')!r}, expected "
            f"{REPORT_VERSION}"
        )
    return report


def markdown(report: Mapping[str, Any], pictures: Sequence[str] = ()) -> str:
    """The report as Markdown; pictures are linked by name."""
    title = f"# {report['heads']['num_heads']} {report['heads']['kind']} heads"
    parts = [f"{title} for {report['target'] or 'a target in memory'}", headline(report)]
    parts += [f"**Warning:** {sentence}." for sentence in report.get("warnings", ())]
    for name, rows in _tables(report).items():
        parts.append(f"## {name}\n\n{in_markdown(rows)}")
    parts.append(LEGEND)
    parts += [f"![{Path(name).stem.replace('_', ' ')}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"


def headline(report: Mapping[str, Any]) -> str:
    best, training = report["tokens_per_step"], report["training"]
    picked = ""
    if training["best_step"] not in (None, training["steps"]):
        picked = f" (the best, of step {training['best_step']})"
    return (
        f"After {training['steps']} steps these heads{picked} give {best['static']:.2f} tokens per "
        f"step with a static tree of {best['nodes']} nodes, simulated on "
        f"{report['held_out']['positions']} held-out positions."
    )


def tables(report: Mapping[str, Any]) -> list[Table]:
    return [on_screen(name, rows) for name, rows in _tables(report).items()]


def _tables(report: Mapping[str, Any]) -> dict[str, Rows]:
    calibration = {entry["head"]: entry for entry in report["calibration"]}
    heads = []
    for entry in report["accuracy"]:
        row = [str(entry["head"]), str(entry["looks_ahead"])]
        row += [f"{share:.3f}" for share in entry["top_k"]]
        if found := calibration.get(entry["head"]):
            errors = (found[moment]["expected_error"] for moment in ("before", "after"))
            row += [f"{found['temperature']:.2f}", *(f"{error:.3f}" for error in errors)]
        heads.append(row)
    columns = ["head", "ahead", *(f"top-{k + 1}" for k in range(RANKS))]
    if calibration:
        columns += ["T", "ECE", "ECE at T"]
    dynamic = {tree["nodes"]: tree["tokens_per_step_anywhere"] for tree in report["dynamic_trees"]}
    trees = [
        [
            str(tree["nodes"]),
            " ".join(map(str, tree["nodes_by_depth"])),
            f"{tree['tokens_per_step']:.2f}",
            f"{tree['tokens_per_step_anywhere']:.2f}",
            f"{dynamic[tree['nodes']]:.2f}" if tree["nodes"] in dynamic else "",
        ]
        for tree in report["static_trees"]
    ]
    tree_columns = ["nodes", "at depth 1, 2, ..", "static, walked", "static, anywhere"]
    return {
        f"Heads on held-out text ({report['held_out']['positions']} positions)": (columns, heads),
        "Simulated tokens per step": ([*tree_columns, "dynamic, anywhere"], trees),
    }


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
