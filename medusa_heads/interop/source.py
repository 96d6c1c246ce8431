"""A foreign checkpoint: a file, a folder or a repository, of which only what is asked for is read.

A whole model may lie there, tens of gigabytes of it. So names come from its index, and files are
mapped: of a tensor nothing is read but what is looked at.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import pickletools
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.files import CONFIG_FILE, VOCAB_MATRIX_FILE
from medusa_heads.checkpoint.tensor_file import why_unreadable
from medusa_heads.files import expanded, read_json
from medusa_heads.hub.names import is_repo_id, split_revision, wanted_revision
from medusa_heads.hub.talking import in_one_sentence
from medusa_heads.hub_probe import hub_failure

HEADS_FILES = tuple(
    f"{name}_lm_head.{suffix}" for name in ("medusa", "hydra") for suffix in ("safetensors", "pt")
)
MODEL_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
# What the pickle of a state_dict names. Of the others that `weights_only` lets by, some take memory
# by a number, or make a long list of a short one.
_NAMED_BY_WEIGHTS = re.compile(
    r"collections OrderedDict|torch ([a-z]\w*|Size)|torch(\.cuda|\.storage)? \w+Storage"
    r"|torch\.serialization _get_layout|torch\.nn\.parameter Parameter"
    r"|torch\._utils _rebuild_(tensor|tensor_v[23]|parameter|parameter_with_state)"
    r"|torch\._utils _rebuild_(sparse_tensor|nested_tensor|meta_tensor_no_storage)"
)
FLOATS, IDS = ["bfloat16", "float16", "float32"], ["int64"]


class Source:
    """What lies in a folder or a repository of the hub. Whatever is asked of it raises ValueError
    where a file is missing, damaged or holds other things.

    Attributes:
        place: the folder or repository, as it can be named again.
        name: the same, or of a single file its path.
        revision: the commit of the hub that the files are of; None for files on disk.
        config: of config.json; empty where there is none.
        files: the file of each tensor, by the tensor's name; of a shard not yet fetched its name.
    """

    def __init__(self, place: str, folder: Path | None, revision: str | None = None) -> None:
        self.name, self.place, self.folder, self.revision = place, place, folder, revision
        config = self.find(CONFIG_FILE)
        self.config: dict[str, Any] = {} if config is None else read_json(config)
        self.files: dict[str, Path | str] = {}
        self._opened: dict[Path, Mapping[str, Tensor]] = {}
        self._own_names: dict[str, str] = {}

    @cached_property
    def unasked(self) -> str | None:
        """Why no hub is asked for files, but only its cache; None where one is."""
        return hub_failure() if self.folder is None else None

    def find(self, file: str) -> Path | None:
        """The path of a file, fetched if need be; None where there is no such file."""
        if Path(file).name != file or file in ("", ".."):  # an index may be anyone's
            raise ValueError(f"{self.place!r} names a file outside its folder: {file!r}")
        if self.folder is not None:
            path = self.folder / file
            if path.is_dir():
                raise ValueError(f"expected a file at {str(path)!r}, found a folder: remove it")
            return path if path.is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
        from transformers.utils.hub import extract_commit_hash

        alone = self.unasked is not None
        with in_one_sentence(self.place, self.revision):
            try:
                found = hf_hub_download(
                    self.place, file, revision=self.revision, local_files_only=alone
                )
            except EntryNotFoundError as error:
                # Not cached is not absent, but where the hub cannot be asked.
                if isinstance(error, LocalEntryNotFoundError) and not alone:
                    raise
                return None
        # From here on all files come from the commit of the first.
        self.revision = extract_commit_hash(found, None) or self.revision
        return Path(found)

    def take(self, path: Path) -> None:
        """Count a file's tensors among the source's, or those that an index names."""
        if path.suffix != ".json":
            self.files |= dict.fromkeys(sorted(self._open(path)), path)
            return
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) for file in weight_map.values()
        ):
            raise ValueError(f"{path} does not say which file holds which tensor: it is damaged")
        self.files |= weight_map

    def call(self, names: Mapping[str, str]) -> None:
        """Let tensors that are there go by other names, of each its own and the other, which none
        has."""
        for own, other in names.items():
            if own in self.files and other not in self.files:
                self.files[other] = self.files.pop(own)
                self._own_names[other] = self._own_names.pop(own, own)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, whose values are not read."""
        return tuple(self._tensor(name)[0].shape)

    def check_shape(self, name: str, expected: tuple[int, ...], why: str = "") -> None:
        """Raises ValueError: a tensor has another shape."""
        if (shape := self.shape(name)) != expected:
            raise ValueError(
                f"{self.name!r}: {name} has shape {list(shape)}, expected {list(expected)}{why}"
            )

    def read(self, name: str, *, expected: Sequence[str] | None = FLOATS) -> Tensor:
        """A tensor in the dtype it is stored in, one of those `expected`, and finite; or, of None,
        whatever it is."""
        tensor, path = self._tensor(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if expected is not None and dtype not in expected:
            raise ValueError(
                f"{path}: {name} is stored as {dtype}, expected one of {expected}: convert heads "
                "that are not quantised"
            )
        if expected is not None and not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {name} holds NaN or infinite values: download it anew")
        return tensor.contiguous().clone()

    def _tensor(self, name: str) -> tuple[Tensor, Path]:
        path = self.files[name]
        if isinstance(path, str):
            found = self.find(path)
            if found is None:
                raise ValueError(
                    f"{self.name!r} lacks {path}, which its index names for {name}: download it "
                    "anew"
                )
            path = found
        content, name = self._open(path), self._own_names.get(name, name)
        if name not in content:
            raise ValueError(f"{path} does not hold {name}, which the index promises: damaged")
        tensor = content[name]
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            raise ValueError(f"{path}: {name} is no plain tensor: heads are not stored so")
        # A view may claim any size over a few bytes of storage, and an old pickle any storage.
        held = min(tensor.untyped_storage().nbytes(), path.stat().st_size)
        if tensor.numel() * tensor.element_size() > held:
            raise ValueError(
                f"{path}: {name} claims more values than the file holds: it is damaged"
            )
        return tensor, path

    def _open(self, path: Path) -> Mapping[str, Tensor]:
        if path not in self._opened:
            self._opened[path] = _mapped(path)
        return self._opened[path]


def open_source(name_or_path: str, *, revision: str | None = None, model: bool = False) -> Source:
    """The heads (or the model with heads in it; with `model`, that alone) in a file, a folder or a
    repository. Raises ValueError: nothing is there, or nothing that holds tensors."""
    path = expanded(name_or_path)
    if path.is_file():
        source = Source(str(path.parent.resolve()), path.parent)
        source.name = str(path.resolve())
        source.take(path)
        return source
    if path.is_dir():
        source = Source(str(path.resolve()), path)
    else:
        repo_id, _ = split_revision(name_or_path)
        old_model = model and "/" not in name_or_path  # gpt2
        if not is_repo_id(repo_id) and not old_model:
            raise ValueError(
                f"expected a checkpoint (a file, a folder or a hub id) at {name_or_path!r}, found "
                "none"
            )
        source = Source(repo_id, None, wanted_revision(name_or_path, revision))
    known = MODEL_FILES if model else (*HEADS_FILES, *MODEL_FILES)
    for file in known:
        if found := source.find(file):
            source.take(found)
            if file in HEADS_FILES and (matrix := source.find(VOCAB_MATRIX_FILE)):
                source.take(matrix)
            return source
    if source.unasked is not None:
        raise ValueError(
            f"no weights of {source.name!r} are in the local cache, and {source.unasked}"
        )
    beside = [] if source.folder is None else sorted(source.folder.glob("*.safetensors"))
    others = [file for file in beside if file.is_file()]
    if len(others) != 1:
        gguf = source.folder is not None and next(source.folder.glob("*.gguf"), None)
        raise ValueError(
            f"{source.name!r} holds no weights: expected one of {', '.join(known)}"
            + (f", or one other .safetensors file, got {len(others)}" if others else "")
            + (f"; {gguf.name} is for llama.cpp, which alone reads it" if gguf else "")
        )
    source.take(others[0])
    return source


def _mapped(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file, whose values are read when they are asked for."""
    from safetensors.torch import load_file

    if path.suffix not in (".safetensors", ".pt", ".bin", ".pth"):
        raise ValueError(f"{path} is none of .safetensors, .pt, .bin: heads are not stored in such")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        zipped = _check_pickles(path)
        # `weights_only` runs none of the code that a pickle may carry.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # of what may go wrong in a pickle there is no list
        raise ValueError(f"{path} cannot be read ({why_unreadable(path, error)})") from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise ValueError(f"{path} holds other things than tensors by name: no heads' weights")
    return content


def _check_pickles(path: Path) -> bool:
    """Whether the pickle is one within a zip file, as torch tells them apart. Its operations are
    read, and none is done. Raises ValueError: it names what no weights need."""
    names: list[str] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        zipped = whole[:4] == b"PK\x03\x04"
        stream: Any = whole
        if zipped:
            stream = io.BytesIO(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
        with contextlib.suppress(Exception):  # of what is no pickle torch.load says so
            for _ in range(1 if zipped else 5):  # one after another, as torch once wrote them
                for operation, name, _ in pickletools.genops(stream):
                    names += [str(name)] if operation.name == "GLOBAL" else []
    if strange := [name for name in names if not _NAMED_BY_WEIGHTS.fullmatch(name)]:
        raise ValueError(f"its pickle asks for {strange[0][:80]!r}, which weights do not need")
    return zipped
