"""Proof that `medusa-heads regenerate`, killed at any moment, asks every prompt and loses none, and
that its memory does not grow with them.

python -m scripts.prove.regeneration --prompts 100000 --kills 5 --out runs/regeneration

A server on this machine speaks the protocol of completions. Every `--real_every`-th prompt is
answered by the demo's target itself. The other texts are made up from the prompt's tokens, the seed
and the temperature of the request, so that they cost little and another request gets another text.
Every hundredth prompt is equal to the one before it.

The command runs three times, each time as a process of its own: with a tenth of the prompts,
undisturbed; with all of them, undisturbed; and with all of them, killed with SIGKILL at random
moments and begun again until it comes to its end. Each prompt must then stand in the rows once and
in order, with the text of the undisturbed run, or be named among the problems. Three negative
controls, rows of which one is lost, doubled or has another token, must be found. Peaks of memory
are the kernel's own for each process.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from medusa_heads.cli.flags.arguments import command
from medusa_heads.machine.memory import resident
from medusa_heads.settings import at_least, flag
from scripts.prove.answering import TARGET, WORDS, Server, answering
from scripts.prove.forks import make_forks_safe
from scripts.prove.killing.chains import import_all
from scripts.prove.kills import ENVIRONMENT

if TYPE_CHECKING:
    from datasets import Dataset

MOST_MEMORY = 3 << 29  # bytes of a process, besides those of the one that it was forked from
MODULES = (
    "medusa_heads.inference.regeneration.regenerate",
    "medusa_heads.inference.regeneration.server_backend",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
FEWEST = 100  # prompts, for a tenth of them, some of them real, and kills among the others
_AT_ONCE = 1000
_CORPUS = "few.jsonl"
_KIB = 1024


@dataclass
class RegenerationArguments:
    """How much to ask, and how hard to disturb it."""

    prompts: int = flag(100_000, "How many are asked.")
    kills: int = flag(5, "How often the command is killed.")
    concurrency: int = flag(16, "Requests at the same time.")
    real_every: int = flag(1000, "Prompts for one of the target's.")
    seed: int = flag(0, "Of prompts and moments.")
    out: str = flag("runs/regeneration", "An empty folder, or that of an earlier proof.")


def work(arguments: RegenerationArguments) -> int:
    """Prove as the flags say; returns 1 where something is wrong, ValueError: a flag is none."""
    at_least(arguments, FEWEST, "prompts")
    at_least(arguments, 0, "kills")
    at_least(arguments, 1, "concurrency", "real_every")
    out = Path(arguments.out).absolute()
    if out.exists() and any(out.iterdir()):
        if not (out / _CORPUS).exists():
            raise ValueError(f"{out} holds other files: choose an empty folder for --out")
        shutil.rmtree(out, ignore_errors=True)  # of an earlier proof
    out.mkdir(parents=True, exist_ok=True)
    with mock.patch.dict(os.environ, ENVIRONMENT | {"HF_HOME": str(out / "hf")}):
        report = prove(arguments, out)
    text = json.dumps(report, indent=2)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return 1 if report["faults"] else 0


def prove(arguments: RegenerationArguments, out: Path) -> dict[str, Any]:
    """All runs and comparisons, as plain values with what is wrong among them."""
    from medusa_heads.checkpoint.provenance import provenance

    import_all(MODULES)  # once, and not in every process that is forked
    most = MOST_MEMORY + resident("VmRSS")
    revision = provenance()["git_sha"]
    corpora = {"few": arguments.prompts // 10, "all": arguments.prompts}
    for name, count in corpora.items():
        write_prompts(out / f"{name}.jsonl", count, arguments.seed)
    with answering(arguments.real_every) as server:
        runs = {
            "few": disturbed(server, out, "few", arguments, []),
            "all": disturbed(server, out, "all", arguments, []),
        }
        rng = random.Random(arguments.seed)
        moments = sorted(rng.uniform(0.02, 0.98) for _ in range(arguments.kills))
        runs["killed"] = disturbed(server, out, "all", arguments, moments, folder="killed")
    few, expected, found = (rows_of(out / name) for name in ("few", "all", "killed"))
    faults = compare(out / "all.jsonl", expected, found)
    for name, each in runs.items():
        count = each["accounting"]
        if count["asked"] != corpora["few" if name == "few" else "all"]:
            faults.append(f"{name}: {count['asked']} prompts are accounted for")
    if len(found) != runs["killed"]["accounting"]["done"]:
        faults.append(f"{len(found)} rows are not as many as are accounted for")
    faults += [
        f"{name}: a process took {max(each['peaks']):,} KiB"
        for name, each in runs.items()
        if max(each["peaks"]) * _KIB >= most
    ]
    if runs["killed"]["kills"] != arguments.kills:
        faults.append(f"killed {runs['killed']['kills']} times instead of {arguments.kills}")
    for name, spoilt in spoil(few):
        if not compare(out / "few.jsonl", few, spoilt):
            faults.append(f"the control in which a row is {name} was not found")
    return {"faults": faults, "runs": runs, "revision": revision}


def write_prompts(file: Path, count: int, seed: int) -> None:
    """Short prompts, a hundredth of them twice."""
    rng = random.Random(seed)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            if number % 100 != 1:
                prompt = f"{number}: {' '.join(rng.choices(WORDS, k=rng.randint(2, 12)))}"
            lines.write(json.dumps({"prompt": prompt}) + "\n")


def disturbed(
    server: Server,
    out: Path,
    corpus: str,
    arguments: RegenerationArguments,
    moments: Sequence[float],
    folder: str | None = None,
) -> dict[str, Any]:
    """Run the command, kill it when the given shares of the corpus are answered, and begin again
    until it comes to its end. Returns what it took, and the record that it left."""
    from medusa_heads.cli.verbs.regenerate import main as regenerate

    place = out / (folder or corpus)
    flags = (
        f"--model_name_or_path {TARGET} --dataset {out / corpus}.jsonl --output_dir {place} "
        f"--backend server --base_url {server.url} --concurrency {arguments.concurrency} "
        "--max_new_tokens 32"
    ).split()
    prompts = arguments.prompts // 10 if corpus == "few" else arguments.prompts
    peaks, kills, started = [], 0, time.monotonic()
    before, real_before = server.counts
    for share in [*moments, None]:
        code, peak = run(
            lambda: regenerate(flags),
            partial(server.has_served, None if share is None else before + int(share * prompts)),
            out / "log.txt",
        )
        peaks.append(peak)
        kills += code == -signal.SIGKILL
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"the command ended with {code}")
    record = json.loads((place / "regeneration.json").read_text(encoding="utf-8"))
    accounting = {k: v for k, v in record["accounting"].items() if k != "problems"}
    return {
        "kills": kills,
        "seconds": round(time.monotonic() - started, 1),
        "peaks": peaks,
        "requests": server.counts[0] - before,
        "real": server.counts[1] - real_before,
        "accounting": accounting,
    }


def run(work: Callable[[], int], is_time: Callable[[], bool], log: Path) -> tuple[int, int]:
    """Do work in a forked process that gets SIGKILL when it is time: its exit code, and its peak
    of memory in KiB. What it says is in the log."""
    make_forks_safe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with log.open("a") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            code = work()
            sys.stdout.flush()
        finally:
            os._exit(code)
    while True:
        ended, status, used = os.wait4(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), used.ru_maxrss
        if is_time():
            os.kill(process, signal.SIGKILL)
            _, status, used = os.wait4(process, 0)
            return os.waitstatus_to_exitcode(status), used.ru_maxrss
        time.sleep(0.002)


def rows_of(folder: Path) -> Dataset:
    """What a run wrote."""
    from datasets import load_from_disk

    return load_from_disk(str(folder))


def compare(corpus: Path, expected: Dataset, found: Dataset) -> list[str]:
    """What is wrong with rows: each prompt of the corpus must stand in them once, in order and with
    the expected text; of some no answer may be expected."""
    from itertools import zip_longest

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(TARGET))
    prompts = (json.loads(line)["prompt"] for line in corpus.open(encoding="utf-8"))
    in_order = (tokenizer(prompt)["input_ids"] for prompt in prompts)
    for place, (one, other) in enumerate(zip_longest(_each(expected), _each(found))):
        faults = []
        if one != other:
            faults.append(f"row {place} differs from the undisturbed run's")
        if other is not None:
            asked = other["input_ids"][: other["labels"].count(-100)]
            if asked not in in_order:  # which goes on behind what was found last
                faults.append(f"row {place} has no prompt of the corpus behind the row before it")
        if faults:
            return faults
    return []


def _each(rows: Dataset) -> Iterator[dict[str, list[int]]]:
    for start in range(0, len(rows), _AT_ONCE):
        table = rows[start : start + _AT_ONCE]
        for ids, labels in zip(table["input_ids"], table["labels"], strict=True):
            yield {"input_ids": ids, "labels": labels}


def spoil(rows: Dataset) -> Iterator[tuple[str, Dataset]]:
    """The negative controls."""
    from datasets import Dataset

    middle, count = len(rows) // 2, len(rows)
    yield "lost", rows.select([n for n in range(count) if n != middle])
    yield "doubled", rows.select(sorted([*range(count), middle]))
    columns = {name: rows[name][:] for name in ("input_ids", "labels")}
    columns["input_ids"][middle][-1] ^= 1
    yield "another", Dataset.from_dict(columns)


main = command("scripts.prove.regeneration", work, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
