"""The files of a checkpoint folder, and folders written whole. By exact names: nothing else of a
training run is ever pushed, and nothing else of a stranger's repository is ever downloaded.

medusa_lm_head.safetensors   the heads, FasterDecoding's key names
vocab_matrix.safetensors     where it was asked for: a copy of the target's vocabulary matrix, which
                             the heads share. vLLM 0.32 reads a folder as it is if the copy lies
                             there; nothing here reads it to draft. It is the target's, and under
                             the target's licence.
config.json                  what FasterDecoding-style loaders (TGI, LoRAX, vLLM 0.32) read
medusa_heads.json            configuration, target fingerprint, statistics, provenance
custom_generate/             makes the folder a decoding method of transformers
adapter/                     of heads trained together with a LoRA adapter: peft's two files
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medusa_heads.contents import ADAPTER_CONFIG, DRAFT_FILE, MTP_FILE, SIDECAR_FILE
from medusa_heads.files import (
    check_folder,
    expanded,
    move_in,
    read_json,
    refuse_link,
    remove_leftovers,
    replace_file,
    staging,
)

FORMAT_VERSION = 1
WEIGHTS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
VOCAB_MATRIX_FILE = "vocab_matrix.safetensors"
ADAPTER_FOLDER = "adapter"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG}", f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}")
CARD_FILE = "README.md"
REPORT_FILE = "report.json"
BENCHMARK_FILE = "benchmark.json"
BENCHMARK_PICTURE = "benchmark.png"
PICTURES = ("tokens_per_step.png", "accuracy.png", "reliability.png", BENCHMARK_PICTURE)

LOADED_FILES = (SIDECAR_FILE, WEIGHTS_FILE, *ADAPTER_FILES)
"""What loading heads reads."""

REPORT_FILES = (REPORT_FILE, "report.md", BENCHMARK_FILE, *PICTURES)
"""What was measured of them."""

KEPT_FILES = (*LOADED_FILES, CONFIG_FILE, VOCAB_MATRIX_FILE, CARD_FILE, *REPORT_FILES)
"""What is taken as it lies in a folder or a repository."""

_GENERATE_FOLDER = "custom_generate"
CUSTOM_GENERATE = {
    # The distribution by name alone: which of its versions reads a checkpoint, the sidecar says.
    f"{_GENERATE_FOLDER}/requirements.txt": "medusa-heads\n",
    f"{_GENERATE_FOLDER}/generate.py": '''\
"""Decode with the heads of this folder or repository, through transformers' own generate():

    model.generate(**inputs, custom_generate="FOLDER OR REPOSITORY", trust_remote_code=True)

The model must be the one the heads were trained for; the text stays what it alone would write.
Options of the heads may be passed along: tree="dynamic:16", acceptance="typical", ...
"""

from medusa_heads import custom_generate as generate

__all__ = ["generate"]
''',
}
"""What transformers loads and runs, after a look at the requirements. Nobody else's are ever taken
from a folder or a hub. They hand on to a name that no later version moves, so that no fix needs a
checkpoint written anew; `inference/models/hub_form.py` does the work."""

OWN_FILES = (*KEPT_FILES, *CUSTOM_GENERATE)
"""All that a checkpoint is."""


def remove_trained(folder: Path) -> None:
    """Remove the heads, the draft model or the modules that a run has left in a folder, what
    vouches for them first. What is none of these stays, and so does a card."""
    weights = "model*.safetensors*"
    trained = {
        SIDECAR_FILE: set(OWN_FILES) - {CARD_FILE},
        DRAFT_FILE: {CONFIG_FILE, "generation_config.json", weights},
        MTP_FILE: {weights},
    }
    for vouching, names in trained.items():
        if not (folder / vouching).is_file():
            continue
        (folder / vouching).unlink(missing_ok=True)
        for path in (path for name in names for path in folder.glob(name)):
            if path.parent == folder or not path.parent.is_symlink():
                path.unlink(missing_ok=True)


def write_custom_generate(folder: Path) -> None:
    """Write both programs into a folder that is not seen yet."""
    (folder / _GENERATE_FOLDER).mkdir()
    for name, content in CUSTOM_GENERATE.items():
        replace_file(folder / name, content)


def read_record(path: Path, *, needed: Iterable[str]) -> dict[str, Any]:
    """A file that vouches for others in its folder, with the objects that it needs to have. Raises
    ValueError: it cannot be read, is of another version, or lacks one."""
    record = read_json(path)
    version = record.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > FORMAT_VERSION  # there was none before 1
        raise ValueError(
            f"{path} has format version {version!r}, this package reads {FORMAT_VERSION}: "
            f"{'upgrade medusa-heads' if newer else 'it is damaged'}"
        )
    for part in needed:
        if not isinstance(record.get(part), dict):
            raise ValueError(f"{path} has no {part!r} part: it is damaged")
    return record


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file of a folder that is not seen yet."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def empty_folder(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder that is to be written, absolute, links followed. Raises ValueError:
    something stands there already, or nothing may be written there."""
    check_folder(folder)
    path = expanded(folder).resolve()
    for place in (path, path.parent):
        remove_leftovers(place)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"{str(folder)!r} exists and is not empty: name another folder to write to"
        )
    check_folder(path)
    return path


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder whose content is that of `folder`, empty or absent, when the block ends without an
    error. An absent one is there whole, or not at all; one that exists stays itself, with its
    rights and whoever is in it, and gets last what vouches for other files."""
    folder = folder.resolve()
    if folder.is_dir():
        with filled(folder, CONFIG_FILE, SIDECAR_FILE) as made:
            yield made
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging(folder.parent) as beside:
        made = beside / folder.name
        made.mkdir()
        yield made
        move_in(beside, folder.parent, [folder.name])


@contextmanager
def filled(folder: Path, *last: str) -> Iterator[Path]:
    """A folder in `folder`, whose files take their places there when the block ends without an
    error: those named `last`, which vouch for the others, after them and in this order. Raises
    ValueError: a link stands in the place of a folder in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with staging(folder) as made:
        yield made
        names = [str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()]
        for inner in {(folder / name).parent for name in names} - {folder}:
            refuse_link(inner)
            inner.mkdir(exist_ok=True)
        places = {name: place for place, name in enumerate(last, start=1)}
        move_in(made, folder, sorted(names, key=lambda name: (places.get(name, 0), name)))
