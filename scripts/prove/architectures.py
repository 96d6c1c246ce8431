"""Which of transformers' causal-LM architectures decode token-exactly: every one is tried.

    python -m scripts.prove.architectures
    python -m scripts.prove.architectures --types llama gemma3_text --output runs/some.md

Every type in transformers' causal-LM mapping is built tiny, examined by the capability gate and, if
trusted, decoded against `generate()` (see architecture_check.py). Results are kept as JSON lines,
so that an interrupted sweep goes on where it stopped; a worker that hangs or dies costs its own
type only. The table is written when the sweep ends.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import transformers
from tqdm import tqdm
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.cli.flags.arguments import command
from medusa_heads.files import replace_file
from medusa_heads.machine.facts import machine_facts
from medusa_heads.settings import flag
from scripts.prove.architecture_check import Result, check, one_line
from scripts.prove.tiny_models import VARIANTS

LIBRARIES = ("torch", "transformers", "peft", "torchao", "bitsandbytes")
MEMORY_LIMIT = 8 << 30
MEANING = {
    "exact tree": "a token tree is verified exactly, at batch 1 and in a left-padded batch of 8",
    "exact chain": "a chain of drafts is verified exactly, one unpadded sequence at a time",
    "exact recurrent": "a chain likewise, from a state that is put back",
    "half precision": "its kernels round to bf16 whatever the dtype; differs at near ties only",
    "refused": "with the reason, before anything is decoded",
    "not buildable": "no tiny model could be made here",
    "unproven": "no difference seen, but its check could not be finished or trusted",
    "MISMATCH": "decoded differently: a defect",
}
VERDICTS = tuple(MEANING)
# Of a note the table leaves out what its row or its verdict says anyway.
USUAL = re.compile(
    r"(^|; )\d+\.\d+ tokens/step, \d+ distinct at least"
    r"|^it keeps a recurrent state, which follows one path at a time"
)
HOW = """What tree decoding makes of every causal-LM type of transformers, built tiny with random
fp32 weights. Each exact type decodes greedily with the true continuation planted on random
branches of a 17-node tree, and is compared token by token with `generate()`. Windows,
chunks and the floors of scales by position are 16 tokens, so that trees straddle their
edges. Each is also decoded with a fault, which must be noticed: a tree with a plain
causal mask, a chain whose nodes do not see each other, a recurrent state that is not put
back, or index keys of rejected drafts that are not dropped. Texts that repeat themselves
prove nothing: their type counts as unproven.

*Keeps* is what the cache holds of a text: rows, one a token; the rows of an index that
chooses what attention reads; tokens compressed into common entries; a recurrent or
convolution state. *Year* is the latest in the copyright lines of the modeling file in
transformers (or else of the configuration file): about when the type was added."""


@dataclass
class MatrixArguments:
    """What is swept, and where the result goes."""

    types: list[str] = flag(
        [], "Model types or variants to run again; all that lack a result if empty."
    )
    new_tokens: int = flag(224, "Tokens generated per sequence; 9 sequences a type.")
    time_limit: int = flag(180, "Seconds a type may take.")
    results: Path = flag(
        Path("runs/architectures.jsonl"), "JSON lines, one a type; the last line of a type counts."
    )
    output: Path = flag(Path("docs/architectures.md"), "The table, as markdown.")


def sweep(arguments: MatrixArguments) -> None:
    """Sweep, then write the table."""
    results = _read(arguments.results)
    for kind, result in _sweep(arguments, results):
        results[kind] = result
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(arguments.output, table(results, arguments.new_tokens))


def _read(path: Path) -> dict[str, Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row := Result(**json.loads(line))).kind: row for line in lines}


def _sweep(arguments: MatrixArguments, known: dict[str, Result]) -> Iterator[tuple[str, Result]]:
    """Check what was asked for, or what has no result yet; each result is kept at once."""
    kinds = arguments.types or [kind for kind in _all_kinds() if kind not in known]
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with _Worker(arguments.time_limit) as worker, arguments.results.open("a") as lines:
        for kind in (bar := tqdm(kinds, unit="type")):
            bar.set_postfix_str(kind)
            result = worker.check(kind, arguments.new_tokens)
            lines.write(json.dumps(asdict(result)) + "\n")
            lines.flush()
            if result.verdict in ("MISMATCH", "unproven"):
                bar.write(f"{kind}: {result.verdict}: {result.note}")
            yield kind, result


def _all_kinds() -> list[str]:
    return [*sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *VARIANTS]


class _Worker:
    """A process that checks types, and is replaced when one hangs or kills it."""

    def __init__(self, time_limit: int) -> None:
        self._time_limit = time_limit
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process is not None and self._process.is_alive():
            self._pipe.send(None)
            self._process.join(timeout=10)
        self._stop()

    def check(self, kind: str, new_tokens: int) -> Result:
        if self._process is None:
            self._start()
        self._pipe.send((kind, new_tokens))
        try:
            if self._pipe.poll(self._time_limit):
                result: Result = self._pipe.recv()
                return result
            failure = f"took more than {self._time_limit} s"
        except (EOFError, ConnectionError):
            failure = "the process died (out of memory, or a crash)"
        self._stop()
        return Result(kind, "unproven", note=failure)

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _work(pipe: Connection) -> None:
    import resource

    import torch
    from transformers.utils import logging

    # A type whose fixture leaves it at full size shall fail to build, not fill the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    while (task := pipe.recv()) is not None:
        kind, new_tokens = task
        try:
            result = check(kind, new_tokens)
        except Exception as error:
            result = Result(kind, "unproven", note=f"the check failed: {one_line(error)}")
        pipe.send(result)


def table(results: dict[str, Result], new_tokens: int) -> str:
    """The markdown page."""
    rows = sorted(results.values(), key=lambda row: row.kind)
    types = [row for row in rows if row.kind not in VARIANTS]
    variants = [row for row in rows if row.kind in VARIANTS]
    counts = Counter(row.verdict for row in types)
    exact = [row for row in rows if row.verdict.startswith("exact")]
    command = f"python -m scripts.prove.architectures --new_tokens {new_tokens}"
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES if find_spec(name))
    differed = sum(row.mismatches for row in rows if row.verdict != "half precision")
    now = datetime.now(timezone.utc)
    sha = (provenance()["git_sha"] or "unknown")[:7]
    minutes = sum(row.seconds for row in rows) / 60
    recent = [row for row in types if (year(row.kind) or 0) >= now.year - 1]
    trusted = sum(row.verdict.startswith("exact") for row in recent)
    return "\n".join(
        [
            "# Architectures",
            "",
            HOW,
            "",
            f"    {command}",
            "",
            f"{now.date().isoformat()}, revision {sha}, {versions}, Python "
            f"{platform.python_version()}, {machine_facts()['cpu']}, fp32, {minutes:.0f} minutes "
            f"of one core. Of {len(types)} types in transformers' causal-LM mapping:",
            "",
            *(f"- {counts[verdict]} {verdict}: {MEANING[verdict]}" for verdict in VERDICTS),
            "",
            f"{sum(row.tokens for row in exact):,} tokens of exact types and variants were "
            f"compared with `generate()`; {differed:,} differed.",
            "",
            f"Of the {len(recent)} types of {now.year - 1} and {now.year}, {trusted} decode "
            f"exactly, {trusted / max(len(recent), 1):.0%}.",
            "",
            "## Types",
            "",
            *_markdown(types, with_year=True),
            "",
            "## Adapters, quantised weights, attention implementations",
            "",
            *_markdown(variants),
            "",
        ]
    )


def year(kind: str) -> int | None:
    """Of the copyright of this type's code, as transformers ships it; None where it says none."""
    modeling = inspect.getsourcefile(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]))
    configuration = inspect.getsourcefile(CONFIG_MAPPING[kind])
    for path in (modeling, configuration):
        assert path is not None
        head = Path(path).read_text()[:1500]
        if years := re.findall(r"copyright.*?((?:19|20)\d\d)", head, re.IGNORECASE):
            return max(map(int, years))
    return None


def _markdown(rows: list[Result], *, with_year: bool = False) -> list[str]:
    columns: dict[str, Callable[[Result], Any]] = {
        "type": lambda row: row.kind,
        "keeps": lambda row: row.keeps,
        "verdict": lambda row: row.verdict,
        "tokens": lambda row: f"{row.tokens:,}" if row.tokens else "",
        "note": lambda row: USUAL.sub("", row.note).removeprefix("; ").replace("|", "/"),
    }
    if with_year:
        columns = {"type": columns.pop("type"), "year": lambda row: year(row.kind) or "", **columns}
    lines = [[str(read(row)) for read in columns.values()] for row in rows]
    ruler = ["---:" if name == "tokens" else "---" for name in columns]
    return [f"| {' | '.join(cells)} |" for cells in [list(columns), ruler, *lines]]


main = command("scripts.prove.architectures", sweep, __doc__)

if __name__ == "__main__":
    sys.exit(main())
