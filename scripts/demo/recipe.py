"""What the demo does: the configuration's settings, this machine's dtypes, the two commands."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.cli.train_heads import ARGUMENTS
from medusa_heads.contents import SIDECAR_FILE
from medusa_heads.machine.products import dtype_name
from scripts.demo.plan import (
    BUDGET,
    FLOOR,
    FULL,
    Amounts,
    Plan,
    Speeds,
    Work,
    from_plain,
    make_plan,
)

if TYPE_CHECKING:
    from medusa_heads.config import HeadsConfig
    from medusa_heads.inference.bench.setting import Setting
    from medusa_heads.machine.choice import Choice
    from medusa_heads.machine.products import Use

COMPILED = "plain-compiled"
ALONE, FASTEST, COPYING, TOGETHER = "heads:static:15", "heads:fastest", "suffix", "heads:auto"
METHODS = ("plain", COMPILED, "transformers-prompt-lookup", COPYING, ALONE, FASTEST, TOGETHER)
# In float32 the texts must be the same; sampled, with transformers' own random stream.
PROVEN = {"greedy": TOGETHER, "sampled": TOGETHER + "+stream"}
TEMPERATURE = 0.7
SEED = 1  # train-heads measures on prompts drawn with 0


@dataclass(frozen=True)
class Recipe:
    """The demo's parts.

    Attributes:
        config: of train-heads.
        folder: for everything that is made.
        full, floor, budget: see make_plan.
        methods: that are compared.
        new_tokens: in every text of the benchmark.
    """

    config: Path = Path("configs/demo.yaml")
    folder: Path = Path("runs/demo")
    full: Amounts = FULL
    floor: Amounts = FLOOR
    budget: float = BUDGET
    methods: tuple[str, ...] = METHODS
    new_tokens: int = 128
    weights_file = "medusa_lm_head.safetensors"

    @property
    def heads(self) -> Path:
        """Folder of the checkpoint."""
        return self.folder / "heads"

    @property
    def states(self) -> Path:
        """Folder of the hidden states, while heads learn from them."""
        return self.folder / "states"

    @property
    def stages_file(self) -> Path:
        """Says which stages are done, and from what."""
        return self.folder / "stages.json"

    @property
    def report_file(self) -> Path:
        """Where the result of the measurement is."""
        return self.folder / "report.json"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration's dataclasses, by name."""
        flags = ["--config", str(self.config)]
        parsed = parse_arguments(ARGUMENTS, flags, prog="demo", description="The demo.")
        return {type(part).__name__: part for part in parsed}

    @cached_property
    def heads_config(self) -> HeadsConfig:
        """Of the heads."""
        config: HeadsConfig = self.settings["HeadsConfig"]
        return config

    @cached_property
    def target(self) -> str:
        """Where the target lies."""
        return str(self.settings["TargetArguments"].model_name_or_path)

    @cached_property
    def train(self) -> Choice:
        """What is fastest here for training."""
        return self._chosen("train")

    @cached_property
    def decode(self) -> Choice:
        """What is fastest here for decoding with trees."""
        return self._chosen("tree")

    def _chosen(self, use: Use) -> Choice:
        from medusa_heads.machine.choice import choose
        from medusa_heads.target.loading import stored_form

        form = stored_form(self.target)
        if form is None:
            raise ValueError(f"expected a target at {self.target!r}, found none")
        return choose(use, stored=form.dtype, shape=form.shape, count_threads=False)

    def plan(self) -> Plan:
        """As much as fits into the budget at the speeds of this machine.

        The speeds are kept in the folder: an interrupted demo goes on with the amounts that it
        began with.
        """
        speeds, work = self._speeds(), self.work()
        return make_plan(speeds, work, full=self.full, floor=self.floor, budget=self.budget)

    def _speeds(self) -> Speeds:
        from medusa_heads.machine.measurements import Measurements

        store = Measurements(self.folder)
        dtypes = [setting.dtype for setting in self.benchmark_settings()]
        facts = {
            "config": self.config.read_text(encoding="utf-8"),
            "train": dtype_name(self.train.dtype),
            "decode": dtypes,
            "new_tokens": self.new_tokens,
        }
        speeds = from_plain(store.read("speeds", facts))
        if speeds is None:
            from scripts.demo.trials import measure_speeds

            speeds = measure_speeds(self, dtypes)
            store.write("speeds", facts, asdict(speeds))
        return speeds

    def work(self) -> Work:
        """What is done with the amounts."""
        distill = self.settings["DistillArguments"]
        runs: dict[str, int] = {}
        for setting in self.benchmark_settings():
            runs[setting.dtype] = runs.get(setting.dtype, 0) + len(setting.methods)
        return Work(
            epochs=self.settings["OptimisationArguments"].num_train_epochs,
            eval_rows=distill.num_eval_prompts,
            writers=distill.generation_workers,
            runs=runs,
            compiles=int(COMPILED in self.methods),
        )

    def train_flags(self, plan: Plan) -> list[str]:
        """Of train-heads."""
        dtype = dtype_name(self.train.dtype)
        given = {
            "config": self.config,
            "output_dir": self.heads,
            "num_prompts": plan.amounts.rows,
            "dtype": dtype,
            "bf16": str(dtype == "bfloat16").lower(),
        }
        if self._have_room(plan):  # then the target reads each row once, and not in every pass
            given |= {"hidden_cache": "auto", "hidden_cache_dir": self.states}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    def _have_room(self, plan: Plan) -> bool:
        """Whether the hidden states take at most half of what is free on the disk."""
        from medusa_heads.target.loading import stored_form

        form, distill = stored_form(self.target), self.settings["DistillArguments"]
        assert form is not None, "its dtype was chosen before"
        tokens = distill.prompt_length + distill.continuation_length
        rows = plan.amounts.rows + distill.num_eval_prompts
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        return rows * tokens * form.shape.hidden * self.train.dtype.itemsize <= free // 2

    def benchmark_settings(self) -> list[Setting]:
        """Speed in the fastest dtype; in float32 the proof that heads leave the text as it is."""
        from medusa_heads.inference.bench.setting import Setting

        measured = {"float32": ("plain",)} | {dtype_name(self.decode.dtype): self.methods}
        return [
            Setting(decoding, dtype, tuple(dict.fromkeys((*methods, *same))))
            for dtype, methods in reversed(measured.items())
            for decoding, proven in PROVEN.items()
            for same in [(proven,) if dtype == "float32" else ()]
        ]

    def measure(self, plan: Plan) -> None:
        """Measure the heads, show the tables and write the report."""
        from rich.console import Console

        from medusa_heads.checkpoint.stored_heads import read_sidecar
        from medusa_heads.inference.bench.prompts import held_out_prompts
        from medusa_heads.inference.bench.report import tables, write_report
        from medusa_heads.inference.bench.run import benchmark
        from medusa_heads.inference.bench.setting import Plan as BenchmarkPlan
        from medusa_heads.target.loading import load_tokenizer
        from medusa_heads.trees.statistics import HeadStatistics

        prompts = held_out_prompts(
            load_tokenizer(self.target),
            num_prompts=plan.amounts.prompts,
            prompt_length=self.settings["DistillArguments"].prompt_length,
            seed=SEED,
        )
        report = benchmark(
            self.heads,
            prompts,
            BenchmarkPlan(
                self.benchmark_settings(),
                max_new_tokens=self.new_tokens,
                temperature=TEMPERATURE,
                seed=SEED,
            ),
            device=str(self.decode.device),
        )
        console = Console()
        console.print(*tables(report))
        stored = read_sidecar(self.heads).get("statistics")
        write_report(self.folder, report, HeadStatistics.from_dict(stored) if stored else None)

    def heads_key(self, plan: Plan) -> str:
        """The plan, the machine, the configuration, the target's files, this package's sources,
        and the Python whose library is the text."""
        from medusa_heads.machine.facts import machine_facts

        decided = {
            "rows": plan.amounts.rows,
            "dtype": dtype_name(self.train.dtype),
            "machine": machine_facts(),
            "version": metadata.version("medusa-heads"),
            "python": platform.python_version(),
        }
        digest = hashlib.sha256(json.dumps(decided, sort_keys=True).encode())
        rooms = ("medusa_heads", "training", "inference", "scripts")
        sources = [file for room in rooms for file in sorted(Path(room).rglob("*.py"))]
        target = sorted(path for path in Path(self.target).iterdir() if path.is_file())
        for file in (self.config, *target, *sources):
            digest.update(file.name.encode() + file.read_bytes())
        return digest.hexdigest()

    def report_key(self, plan: Plan) -> str:
        """The heads and the report as they lie there, and the settings of the measurement."""
        decided = {
            "prompts": plan.amounts.prompts,
            "new_tokens": self.new_tokens,
            "settings": [asdict(setting) for setting in self.benchmark_settings()],
        }
        digest = hashlib.sha256((self.heads_key(plan) + json.dumps(decided)).encode())
        for file in (self.heads / self.weights_file, self.heads / SIDECAR_FILE, self.report_file):
            digest.update(file.read_bytes())
        return digest.hexdigest()
