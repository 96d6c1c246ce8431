"""The demo on a reduced plan: its stages run, and run again only where their inputs changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from scripts.demo.__main__ import main, run_demo
from scripts.demo.plan import Amounts, Plan
from scripts.demo.recipe import ALONE, TOGETHER, Recipe
from scripts.demo.screen import findings, shortened

ROOT = Path(__file__).parents[3]
LEAST = Amounts(rows=16, prompts=1)


@pytest.fixture
def small(short_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The demo's recipe, cut to seconds; nothing is compiled, and pictures are empty files."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("medusa_heads.inference.bench.report.draw", lambda *to: to[-1].touch())
    settings = yaml.safe_load(Path("configs/demo.yaml").read_text())
    settings |= {"num_eval_prompts": 4, "continuation_length": 12, "prompt_length": 16}
    settings["model_name_or_path"] = str(short_demo)
    settings |= {"num_train_epochs": 1, "generation_workers": 1, "generation_batch_size": 16}
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(settings))
    return Recipe(
        config=config,
        folder=tmp_path / "demo",
        full=Amounts(rows=32, prompts=2),
        floor=LEAST,
        budget=1.0,
        methods=("plain", ALONE, TOGETHER),
        new_tokens=8,
    )


class Trained:
    """Heads that took no time to train."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.runs = recipe, 0

    def __call__(self, flags: list[str]) -> int:
        self.runs += 1
        self.recipe.heads.mkdir(parents=True)
        for name in ("medusa_heads.json", "medusa_lm_head.safetensors"):
            (self.recipe.heads / name).touch()
        return 0


@pytest.mark.parametrize(
    ("flag", "code", "said"), [("--help", 0, "usage: demo"), ("--fast", 2, "'--fast'")]
)
def test_flags_are_answered_before_anything_runs(
    flag: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main([flag]) == code
    except SystemExit as left:
        assert left.code == code
    shown = capsys.readouterr()
    assert said in shown.out + shown.err and "Trying how fast" not in shown.out


def run(recipe: Recipe) -> str:
    """What the demo prints."""
    torch.manual_seed(0)
    screen = StringIO()
    assert run_demo(recipe, Console(file=screen, width=200)) == 0
    return screen.getvalue()


def test_stages_run_once(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    cached: list[Path] = []

    def removed(folder: Path, **options: Any) -> None:
        cached.extend(folder.rglob("*.states"))
        shutil.rmtree(folder, **options)

    monkeypatch.setattr("scripts.demo.__main__.rmtree", removed)
    first = run(small)
    assert "1 of 2: train" in first and "2 of 2: measure" in first
    assert "This is the least text that the heads need (16 pieces of 32, 1 prompts of 2)" in first
    report = json.loads((small.folder / "report.json").read_text())
    setting = report["settings"][0]
    assert [method["name"] for method in setting["methods"]] == list(small.methods)
    assert setting["prompts"] == 1
    assert "the heads alone write" in first and "1 of 1 texts are token for token" in first
    run_file = yaml.safe_load((small.heads / "run.yaml").read_text())
    assert run_file["distillation"]["num_prompts"] == 16
    assert cached and not small.states.exists()  # the target read the text once for all passes

    # A copy remembers nothing: what it knows, it has read.
    second = run(replace(small))
    assert "train and measure reused" in second and "1 of 2: train" not in second

    # Another report in its place is not taken for the demo's own.
    own = small.report_file.read_text()
    small.report_file.write_text("{}")
    assert small.report_key(small.plan()) != json.loads(small.stages_file.read_text())["measure"]
    small.report_file.write_text(own)

    # A report that is not there is made of the heads that are.
    small.report_file.unlink()

    def measured(recipe: Recipe, _: object) -> None:
        recipe.report_file.write_text(own)

    with monkeypatch.context() as again:
        again.setattr(Recipe, "measure", measured)
        third = run(replace(small))
    assert "train reused" in third and "2 of 2: measure" in third

    # More text by the plan: other heads, and another report. What the target wrote stays.
    more = replace(small, floor=Amounts(rows=32, prompts=1))
    plan = more.plan()
    assert plan.amounts == Amounts(rows=32, prompts=1)
    assert more.heads_key(plan) != small.heads_key(small.plan())
    assert more.report_key(plan) != small.report_key(small.plan())


def test_fewer_prompts_are_measured_where_training_took_long(
    small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(Amounts(16, 2), train_seconds=1e-3, measure_seconds=2.0, prompt_seconds=1.0)
    monkeypatch.setattr(Recipe, "plan", lambda _: plan)
    monkeypatch.setattr("scripts.demo.__main__.train_heads.main", trained := Trained(small))
    monkeypatch.setattr("scripts.demo.__main__.show_result", lambda *_, **__: None)
    measured: list[int] = []

    def measure(recipe: Recipe, plan: Plan) -> None:
        measured.append(plan.amounts.prompts)
        for name in ("report.json", "report.png"):
            (recipe.folder / name).touch()

    monkeypatch.setattr(Recipe, "measure", measure)
    assert "1 prompts are measured in place of 2" in run(small)
    # They are as few the next time, and so nothing is done again.
    assert "train and measure reused" in run(replace(small))
    small.report_file.unlink()
    run(replace(small))
    assert measured == [1, 1] and trained.runs == 1


def test_an_interrupted_demo_goes_on_with_its_amounts(
    small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_heads.cli.train_heads.main", lambda flags: 130)
    assert run_demo(small, Console(file=StringIO())) == 130
    assert not small.stages_file.exists()
    again = replace(small)
    monkeypatch.setattr("scripts.demo.trials.measure_speeds", pytest.fail)
    assert again.plan() == small.plan()


def test_a_small_disk_holds_no_states(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target then reads the text in every pass."""
    plan, used = Plan(LEAST, 1, 1), shutil.disk_usage(small.folder.parent)
    for free, kept in ((1 << 40, True), (1 << 12, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: used._replace(free=free))
        assert ("--hidden_cache_dir" in small.train_flags(plan)) is kept


def test_the_screen_says_what_was_cut() -> None:
    recipe = Recipe()
    assert shortened(recipe, Plan(recipe.full, 100, 100)) == []
    (cut,) = shortened(recipe, Plan(Amounts(1024, 9), 180, 110))
    assert "1,024 pieces of text in place of 3,072, and 9 prompts" in cut
    (least,) = shortened(recipe, Plan(recipe.floor, 400, 200))
    assert least.startswith("This is the least text") and least.endswith("it takes 10 minutes.")


def test_the_heads_own_share_is_told_apart() -> None:
    def method(name: str, speedup: float, tokens: float) -> dict[str, object]:
        return {"name": name, "speedup": speedup, "tokens_per_step": tokens, "identical": 1.0}

    methods = [method("plain", 1.0, 1.0), method("suffix", 2.0, 3.0)]
    methods += [method("heads:static:15", 1.5, 2.5), method("heads:auto", 2.5, 4.0)]
    methods.append(method("heads:fastest", 1.7, 2.1) | {"nodes": 3})
    setting = {"name": "greedy", "dtype": "float32", "prompts": 4, "methods": methods}
    alone, fastest, copying, proof = findings({"settings": [setting | {"reference": "plain"}]})
    assert "heads alone write 2.50 tokens a step, 1.50x the speed of plain" in alone
    assert "of 3 nodes: 2.10 tokens a step, 1.70x" in fastest
    methods[-1]["nodes"] = 0
    _, none, *_ = findings({"settings": [setting | {"reference": "plain"}]})
    assert none.strip() == "No tree of theirs should be faster here than none: 1.70x."
    assert "without heads: 2.00x. Both, chosen at every step: 2.50x" in copying
    assert "4 of 4 texts are token for token" in proof
