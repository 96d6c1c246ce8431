"""Chains of kills: a command is killed, looked at, run again, and compared in the end."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from scripts.prove.killing.commands import Command, make_given
from scripts.prove.killing.faults import how_it_differs, of_the_death, of_the_end
from scripts.prove.killing.folder_state import half_checkpoints, is_refused, leftovers, read_folder
from scripts.prove.killing.process import Ending, Gate, Moment, run
from tests.hub.hub_server import LocalHub, log_in

ALICE = "hf_alicealicealice"
REPOSITORY = "alice/heads"
# What every process needs; what else they import is learnt from the first of each command.
MODULES = (
    "medusa_heads.training.runs.heads",
    "medusa_heads.inference.models.medusa",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "matplotlib.figure",
    "datasets",
    "peft",
)


@dataclass(frozen=True)
class Reference:
    """What a command does and leaves when nobody disturbs it."""

    folder: Path
    events: list[str]
    seconds: float
    left: dict[str, str]


class Chains:
    """Kills commands in folders of their own.

    Args:
        scratch: an empty folder.
        commands: those that will be killed; each is run undisturbed first.
    """

    def __init__(self, scratch: Path, commands: Sequence[Command]) -> None:
        self.scratch = scratch
        self.given = scratch / "given"
        import_all(MODULES)
        self._ask("given", lambda: make_given(self.given))
        self.references = {command.name: self._undisturbed(command) for command in commands}
        self.seconds = {name: found.seconds for name, found in self.references.items()}

    def kill(
        self, command: Command, rng: random.Random, number: int, inside: int
    ) -> dict[str, Any]:
        """One chain.

        Args:
            command: to be killed.
            rng: of the moments.
            number: kills so far.
            inside: how many of them fell within a write.

        Returns:
            `kills`, each with `signal`, `inside`, `evidence`, `code`, `dying` and `faults`; and the
            `faults` of the end.
        """
        folder = self.scratch / "chain"
        reference = self.references[command.name]
        kills: list[dict[str, Any]] = []
        with self._place(command, folder) as place:
            before, remains = place.read()[0], set[str]()
            for _ in range(rng.randint(1, command.kills)):
                so_far = number + len(kills)
                within = inside + sum(kill["inside"] is not None for kill in kills)
                events: list[int] = []
                if 20 * within < 9 * (so_far + 1):
                    phase = rng.choice(list(command.phases))
                    events = [
                        n for n, e in enumerate(reference.events, 1) if command.phase_of(e) == phase
                    ]
                sign = rng.choice((signal.SIGKILL, signal.SIGTERM))
                seconds = self.seconds[command.name]
                ending = place.run(Moment.draw(rng, events, seconds), sign)
                if ending.dying is None or ending.code == 0:
                    # It came to its end first: earlier runs had to import what is now there.
                    self.seconds[command.name] = min(seconds, ending.seconds)
                    return {"kills": kills, "faults": self._compare(place, ending, reference)}
                kills.append(self._look(place, ending, sign, before, remains))
                remains = place.remains()
            return {"kills": kills, "faults": self._compare(place, place.run(), reference)}

    def control(self, command: Command) -> dict[str, Any]:
        """Resume at the wrong rows; a comparison that sees nothing there is worth nothing."""
        reference = self.references[command.name]
        wrong = replace(
            command, flags=command.flags.replace("true}}", 'true,"ignore_data_skip":true}}')
        )
        saved = [n for n, e in enumerate(reference.events, 1) if "checkpoint-4" in e][:1]
        with self._place(command, self.scratch / "control") as place:
            place.run(Moment(saved[0], 0.0, held=True), signal.SIGTERM)
            place.command = wrong
            found = self._compare(place, place.run(), reference)
        return {
            "kills": [],
            "differences": len(found),
            "faults": [] if found else ["nothing differs"],
        }

    def _undisturbed(self, command: Command) -> Reference:
        folder = self.scratch / f"whole {command.name}"
        with self._place(command, folder) as place:
            ending = place.run(learn=True)
            left, broken = place.read()
        if ending.code or broken:
            raise RuntimeError(f"{command.name} failed: {broken}\n{ending.output}")
        return Reference(folder, ending.events, ending.seconds, left)

    def _look(
        self,
        place: Place,
        ending: Ending,
        sign: signal.Signals,
        before: dict[str, str],
        earlier: set[str],
    ) -> dict[str, Any]:
        """What a kill has left; `earlier` ones left their own."""
        command, reference = place.command, self.references[place.command.name]
        left, broken = place.read()
        refused = [fault for fault in broken if is_refused(fault)]
        faults = [fault for fault in broken if fault not in refused]
        for name in {*before, *left} & {*before, *reference.left}:
            known = (before.get(name), reference.left.get(name))
            if left.get(name) not in known:
                lost = "is lost" if name not in left else "is neither as before nor as it should be"
                faults.append(f"{name} {lost}")
        stood = ending.stood_at
        remains = sorted(place.remains() - earlier)
        phase = command.phase_of(stood) if stood is not None else None
        if phase is None and remains:
            phase = command.phase_of(f"open {remains[0]}")
        evidence = f"stood at {stood}" if stood is not None and phase else f"left {remains[:3]}"
        return {
            "signal": sign.name,
            "code": ending.code,
            "dying": round(ending.dying or 0.0, 3),
            "inside": phase,
            "evidence": evidence if phase else None,
            "refused": bool(refused),
            "faults": faults + of_the_death(ending, sign),
        }

    def _compare(self, place: Place, ending: Ending, reference: Reference) -> list[str]:
        """What is wrong with a run that came to its end, and with what it left."""
        left, broken = place.read()
        whole = place.command.once and ending.code == 2 and left == reference.left
        faults = [] if whole else of_the_end(ending)
        # SIGTERM writes checkpoints that an undisturbed run does not.
        names = sorted({name for name in left if "/checkpoint-" not in name} | set(reference.left))
        faults += broken
        for name in names:
            if left.get(name) != reference.left.get(name):
                faults.append(
                    f"{name} differs{how_it_differs(reference.folder, place.folder, name)}"
                )
        return faults + [f"{name} was left over" for name in leftovers(place.folder)]

    @contextmanager
    def _place(self, command: Command, folder: Path) -> Iterator[Place]:
        command.begin(folder, self.given)
        place = Place(self, command, folder)
        if not command.hub:
            yield place
            return
        with LocalHub({ALICE: "alice"}) as hub:
            place.hub = hub
            if command.published is not None:
                root = self.given / command.published
                files = [path for path in root.rglob("*") if path.is_file()]
                hub.upload(REPOSITORY, {str(p.relative_to(root)): p.read_bytes() for p in files})
            yield place

    def _ask(self, name: str, question: Callable[[], Any]) -> Any:
        """The answer of a process of its own, as plain values."""
        answer = self.scratch / f"{name}.json"

        def work() -> int:
            answer.write_text(json.dumps(question()))
            return 0

        folder = self.scratch / "asking"
        folder.mkdir(exist_ok=True)
        ending = run(work, folder)
        if ending.code:
            raise RuntimeError(ending.output)
        return json.loads(answer.read_text())


class Place:
    """Where a command works: its folder, and perhaps a hub."""

    def __init__(self, chains: Chains, command: Command, folder: Path) -> None:
        self.chains, self.command, self.folder = chains, command, folder
        self.hub: LocalHub | None = None

    def run(
        self,
        moment: Moment | None = None,
        sign: signal.Signals = signal.SIGKILL,
        *,
        learn: bool = False,
    ) -> Ending:
        """Run the command here, until its end or a moment.

        `learn`: what it imports is then imported here, so that no later process need do so.
        """
        modules = self.folder.parent / "modules.json"
        cache = self.folder / "cache" if "cache/" in str(self.command.phases) else None
        hub, scratch = self.hub, self.folder.parent

        def work() -> int:
            os.environ["MEDUSA_HEADS_CACHE"] = str(cache or scratch / "cache")
            if hub is not None:
                log_in(hub, ALICE, scratch / f"{self.folder.name}-hub", pytest.MonkeyPatch())
                os.environ["MEDUSA_HEADS_CACHE"] = str(scratch / "cache")
            sys.argv = [self.command.name]
            code = self.command.work(self.chains.given)()
            if learn:
                modules.write_text(json.dumps(sorted(sys.modules)))
            return code

        gate = None
        if hub is not None and self.command.main.endswith("push"):
            gate = Gate()
            hub.before = lambda method, path: gate.pass_by(f"{method} {path}")
        try:
            ending = run(work, self.folder, moment, sign, gate=gate)
        finally:
            if gate is not None and hub is not None:
                hub.before = lambda method, path: None
                gate.close()
        if learn and ending.code == 0:
            import_all(json.loads(modules.read_text()))
        return ending

    def remains(self) -> set[str]:
        """What was begun and not ended, by its names."""
        return {*leftovers(self.folder), *half_checkpoints(self.folder)}

    def read(self) -> tuple[dict[str, str], list[str]]:
        """What lies here, by a reader of its own: digests, and what is broken."""
        left, broken = self.chains._ask("reading", lambda: read_folder(self.folder))
        if self.hub is not None and REPOSITORY in self.hub.repositories:
            tree = self.hub.repositories[REPOSITORY].tree()
            left |= {
                f"hub: {name}": hashlib.sha256(data).hexdigest() for name, data in tree.items()
            }
        return left, broken


def import_all(modules: Sequence[str]) -> None:
    """Import these; those that are no modules to be imported are left out."""
    for name in modules:
        if name not in sys.modules:
            with suppress(Exception):
                import_module(name)
    gc.collect()
    gc.freeze()  # what a forked process never writes to is never copied
