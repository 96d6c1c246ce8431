"""What the files of a folder say, as those would read them that they are for: a digest of each
whole thing, and a sentence on each that is broken.

Names of parts whose division into files has no meaning (answers) are those of what lies in them.
Times are left out: they differ between any two runs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEFTOVER = re.compile(r"\..*\.part|\.tmp\w+")
# Times, the revision, which a commit changes meanwhile, random names, and what hangs on when a
# run was told to stop: how many answers an earlier one made, and that this one stops.
_TIMES = re.compile(
    r"created|seconds|\w*_(runtime|per_second|preparation_time)|_fingerprint|reused|git_sha|should_training_stop"
)
# Drawn or written for people; tested to be whole, and full of times.
_FOR_PEOPLE = (".md", ".png", ".txt", ".py")


def read_folder(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Digests by name, and what is wrong; files of killed writes are nobody's to read."""
    digests: dict[str, str] = {}
    broken: list[str] = []
    for path in sorted(files_of(folder)):
        name = path.relative_to(folder).as_posix()
        try:
            for part, content in _read(path, name):
                digests[part] = digest(content)
        except Exception as error:  # each library has its own
            broken.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    for check in (_heads, _draft, _rows):
        for path in _folders(folder):
            try:
                check(path)
            except Exception as error:
                broken.append(f"{path.relative_to(folder)}: {str(error)[:200]}")
    return digests, broken


def is_refused(fault: str) -> bool:
    """Whether a reader is told to bring heads anew: between two renames of files that are written
    over others, new weights stand beside an old checksum."""
    return "its checksum differs" in fault


def leftovers(folder: Path) -> list[str]:
    """What killed writes left, in the folder and beside it."""
    found = [p for p in folder.rglob("*") if LEFTOVER.fullmatch(p.name)]
    return sorted(str(path.relative_to(folder)) for path in found)


def half_checkpoints(folder: Path) -> list[str]:
    """Checkpoints of a run that are not whole."""
    from medusa_heads.training.runs.resumable import is_whole

    found = [p for p in folder.rglob("checkpoint-*") if p.is_dir() and not is_whole(p)]
    return sorted(str(path.relative_to(folder)) for path in found)


def files_of(folder: Path) -> Iterator[Path]:
    """Those that somebody would read."""
    half = {folder / name for name in half_checkpoints(folder)}
    for path in _folders(folder):
        if path in half or half & set(path.parents):
            continue
        for file in path.iterdir():
            if file.is_file() and not LEFTOVER.fullmatch(file.name):
                yield file


def _folders(folder: Path) -> Iterator[Path]:
    yield folder
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if path.is_dir() and not any(LEFTOVER.fullmatch(part) for part in inside):
            yield path


def _read(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    """What a file holds, as pairs of names and plain values or tensors."""
    if path.suffix == ".safetensors":
        yield name, _tensors(path)
    elif path.suffix == ".states":
        yield name, path.read_bytes()
    elif path.name == "index.bin":
        from medusa_heads.training.hidden.layout import Index

        if Index.read(path.parent).is_whole:  # else it vouches for nothing
            yield name, path.read_bytes()
    elif path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        # A measurement is a time, and is kept only where nothing else runs.
        if not (isinstance(content, dict) and set(content) == {"of", "values"}):
            yield name, without_times(content)
    elif path.suffix == ".jsonl" and path.parent.parent.name == "answers":
        # A line that was not written to its end is nobody's to read.
        for line in path.read_bytes().split(b"\n")[:-1]:
            key, *answer, _ = json.loads(line)
            yield f"{Path(name).parent.as_posix()}: answer {key}", answer
    elif path.suffix == ".jsonl":
        yield name, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    elif path.suffix == ".yaml":
        import yaml

        yield name, without_times(yaml.safe_load(path.read_text(encoding="utf-8")))
    elif path.suffix == ".arrow":
        import pyarrow as pa

        with pa.memory_map(str(path)) as source:
            yield name, pa.ipc.open_stream(source).read_all().to_pylist()
    elif path.suffix in (".pt", ".pth", ".bin"):
        import torch

        content = torch.load(path, weights_only=False)
        if path.name != "training_args.bin":  # holds the time it began in the names of its logs
            yield name, content
    elif path.suffix == ".png":
        assert path.read_bytes().endswith(b"IEND\xaeB`\x82"), "a picture without an end"
    else:
        text = path.read_text(encoding="utf-8")
        if path.suffix not in _FOR_PEOPLE:
            yield name, text


def _tensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in sorted(file.keys())}


def _heads(folder: Path) -> None:
    from medusa_heads.checkpoint.stored_heads import SIDECAR_FILE, read_stored

    if (folder / SIDECAR_FILE).exists():
        read_stored(folder)


def _draft(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    from medusa_heads.checkpoint.draft_checkpoint import read_draft_sidecar
    from medusa_heads.contents import DRAFT_FILE

    if (folder / DRAFT_FILE).exists():
        read_draft_sidecar(folder)
        AutoModelForCausalLM.from_pretrained(folder)


def _rows(folder: Path) -> None:
    from datasets import load_from_disk

    if (folder / "state.json").exists():
        load_from_disk(str(folder))


def without_times(content: Any) -> Any:
    """Plain values less those that hold a time."""
    if isinstance(content, dict):
        kept = {k: v for k, v in content.items() if not _TIMES.fullmatch(str(k))}
        return {key: without_times(value) for key, value in kept.items()}
    if isinstance(content, list):
        return [without_times(value) for value in content]
    return content


def changed(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Where plain values differ, and how."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from changed(one.get(key), other.get(key), f"{at}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from changed(a, b, f"{at}[{place}]")
    elif one != other:
        yield f"{at}: {str(one)[:60]} became {str(other)[:60]}"


def digest(content: Any) -> str:
    """Of plain values, arrays and tensors, however deep; bit for bit."""
    import numpy as np
    import torch

    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            add([str(value.dtype), list(value.shape)])
            found.update(
                value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, np.ndarray):
            add([str(value.dtype), list(value.shape)])
            found.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(key)
                add(value[key])
        elif isinstance(value, list | tuple):
            found.update(f"[{len(value)}".encode())
            for each in value:
                add(each)
        else:
            found.update(f"{value!r};".encode())

    add(content)
    return found.hexdigest()[:16]
