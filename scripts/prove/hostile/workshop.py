"""Where inputs are made and tried: a folder tree of its own, in which every write is seen."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[3]
DEMO_TARGET = ROOT / "assets" / "demo-target"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Audit events whose first arguments are paths that change; with how many of them do.
_CHANGES = {
    "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.rename": 2,
    "os.link": 2, "os.symlink": 2, "os.chmod": 1,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


_watching: list[Workshop] = []


@cache
def _listen() -> None:
    """Once: a hook of the interpreter cannot be taken out again."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        for workshop in _watching:
            workshop._hear(event, arguments)

    sys.addaudithook(hear)


@dataclass(frozen=True)
class Place:
    """Where one input lies, and where the program may write.

    Attributes:
        inputs: folder of the input; nothing there may change.
        out: folder of the run; not there yet, alone in its own folder.
        marker: a path that hostile code would write to, if it were run.
        outside: folder full of files that are none of the program's business.
    """

    inputs: Path
    out: Path
    marker: Path
    outside: Path


@dataclass
class Seen:
    """What happened beyond the run's own folder."""

    outside: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)


class Workshop:
    """A folder tree with a home, a working folder and a secret to look after.

    `home/`, `cwd/`, `outside/` and each input must stay as they are; `own/` holds what the proof
    itself prepares, `caches/` and `tmp/` are where the environment says that caches and temporary
    files go.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        for name in ("home", "cwd", "outside", "markers", "caches", "tmp", "own", "cases"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "outside" / "secret.txt").write_text("a secret of somebody else's")
        (self.root / "home" / ".netrc").write_text("machine example login me password secret")
        self._seen = Seen()
        self._allowed: tuple[str, ...] = ()
        self._inputs = ""

    @contextmanager
    def entered(self) -> Iterator[Workshop]:
        """The process lives here: home, working folder, caches and temporary files."""
        caches = self.root / "caches"
        values = {
            "HOME": str(self.root / "home"),
            "XDG_CACHE_HOME": str(caches / "xdg"),
            "MPLCONFIGDIR": str(caches / "matplotlib"),
            "MEDUSA_HEADS_CACHE": str(caches / "measured"),
            "TMPDIR": str(self.root / "tmp"),
        }
        cwd = Path.cwd()
        with (
            patch.dict(os.environ, values),
            patch("sys.dont_write_bytecode", True),
            patch("tempfile.tempdir", values["TMPDIR"]),
        ):
            os.environ.pop("MEDUSA_HEADS_TRACEBACK", None)
            os.chdir(self.root / "cwd")
            try:
                yield self
            finally:
                os.chdir(cwd)

    @contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """A place for one input, removed afterwards."""
        folder = self.root / "cases" / name
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("inputs", "run"):
            (folder / name).mkdir(parents=True)
        marker = self.root / "markers" / "ran"
        try:
            yield Place(folder / "inputs", folder / "run" / "out", marker, self.root / "outside")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def watched(self, place: Place) -> Iterator[Seen]:
        """See what is written, and whether code of the input is run, while the block runs."""
        seen = Seen()
        hub = os.environ.get("HF_HOME")
        roots = [self.root / "tmp", self.root / "caches", self.root / "own", place.out.parent]
        allowed = [*map(str, roots), "/dev/"] + ([os.path.realpath(hub)] if hub else [])
        before = self._tree(place)
        self._allowed, self._inputs, self._seen = tuple(allowed), str(place.inputs), seen
        _listen()
        _watching.append(self)
        try:
            yield seen
        finally:
            _watching.clear()
            after = self._tree(place)
            changed = sorted(
                path for path in {*before, *after} if before.get(path) != after.get(path)
            )
            seen.outside += [path for path in changed if "/markers/" not in path]
            seen.ran += [path for path in changed if "/markers/" in path]
            for left in (self.root / "markers").iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _tree(self, place: Place) -> dict[str, tuple[int, ...]]:
        """Every file that must not change: size and time; and the names beside the folders."""
        found: dict[str, tuple[int, ...]] = {}
        watched = [self.root / name for name in ("home", "cwd", "outside", "markers")]
        folders = [*watched, place.inputs]
        for folder in folders:
            for top, names, files in os.walk(folder):
                for name in [*names, *files]:
                    status = os.lstat(os.path.join(top, name))
                    times = (0, 0) if os.path.isdir(os.path.join(top, name)) else (
                        status.st_size, status.st_mtime_ns
                    )  # fmt: skip
                    found[os.path.join(top, name)] = (status.st_mode, *times)
        beside = [*self.root.iterdir(), *(self.root / "cases").iterdir()]
        beside += [*place.inputs.parent.iterdir()]
        beside += [path for path in place.out.parent.iterdir() if path != place.out]
        return found | {str(path): (0,) for path in beside}

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """What the interpreter itself reports."""
        seen = self._seen
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING:
                self._wrote(path, seen)
        elif event in _CHANGES:
            folders = [each for each in arguments[_CHANGES[event] :] if isinstance(each, int)]
            if not any(each >= 0 for each in folders[-2:]) or event == "os.mkdir":
                for path in arguments[: _CHANGES[event]][-1:]:
                    self._wrote(path, seen)
        elif event == "exec":
            file = getattr(arguments[0], "co_filename", "")
            if file.startswith(self._inputs):
                seen.ran.append(file)
        elif event == "os.system":
            seen.ran.append(str(arguments[0]))

    def _wrote(self, path: Any, seen: Seen) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        real = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path))))
        full = os.path.join(real, os.path.basename(os.fsdecode(path)))
        if not full.startswith(self._allowed) and "/markers" not in full:
            seen.outside.append(full)

    # What several kinds of inputs are tried on.

    @cached_property
    def target_folder(self) -> Path:
        """A tiny target with the demo's tokenizer, on disk."""
        from scripts.measure.random_target import random_target

        folder = self.root / "own" / "target"
        target = random_target("32x1x2", 4096)
        target.model.config.max_position_embeddings = 256
        target.model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(DEMO_TARGET / name, folder / name)
        return folder

    @cached_property
    def target(self) -> Any:
        """The same in memory."""
        from medusa_heads import TargetModel

        return TargetModel.from_pretrained(str(self.target_folder), dtype="float32", device="cpu")

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        from medusa_heads.target.loading import load_tokenizer

        return load_tokenizer(str(self.target_folder))

    @cached_property
    def template(self) -> Path:
        """A chat template."""
        path = self.root / "own" / "chat.jinja"
        path.write_text(TEMPLATE)
        return path

    def heads(self, **config: Any) -> Path:
        """A checkpoint of such heads on the target, made once."""
        import torch

        from medusa_heads import HeadsConfig
        from medusa_heads.checkpoint.checkpoint import save_heads
        from medusa_heads.heads import new_heads
        from medusa_heads.trees.statistics import HeadStatistics

        folder = self.root / "own" / "-".join(["heads", *map(str, config.values())])
        if not folder.exists():
            shape = HeadsConfig(num_heads=2, **config)
            tokens_V = torch.arange(0, 40, 2) if "draft_vocab_size" in config else None
            made = new_heads(self.target, shape, tokens_V)
            ranks_SK = torch.randint(0, 4, (40, 2), generator=torch.Generator().manual_seed(3))
            save_heads(folder, made, self.target, statistics=HeadStatistics.from_ranks(ranks_SK))
        return folder
