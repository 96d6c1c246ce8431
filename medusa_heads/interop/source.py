"""A foreign checkpoint: a file, a folder or a repository, of which only what is asked for is read.

A whole model may lie there, tens of gigabytes of it. So names come from its index, shapes from the
headers of the files that hold them, and values last, tensor by tensor.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.vocab_matrix import VOCAB_MATRIX_FILE
from medusa_heads.files import expanded, read_json
from medusa_heads.hub.names import is_repo_id, split_revision
from medusa_heads.hub.talking import in_one_sentence

CONFIG_FILE = "config.json"
HEADS_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
MODEL_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.int64}
_SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


@dataclass
class Source:
    """What lies at `name`.

    Attributes:
        name: as it can be named again: a hub id, or an absolute path.
        config: of config.json; empty where there is none.
        files: the file of each tensor, by the tensor's name.
        revision: the commit of the hub that the files are of.
    """

    name: str
    config: dict[str, Any]
    files: dict[str, Path | str]
    place: Place
    _opened: dict[Path, Mapping[str, Tensor] | SafeFile] = field(default_factory=dict)

    @property
    def revision(self) -> str | None:
        """The commit of the hub that the files are of; None for files on disk."""
        return self.place.revision

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it.

        Raises:
            ValueError: its file is missing or damaged.
        """
        file, path = self._file(name)
        if isinstance(file, SafeFile):
            return file.shape(name)
        return tuple(_pickled(file, name, path).shape)

    def read(self, name: str, *, of_heads: bool = True) -> Tensor:
        """A tensor, in the dtype it is stored in.

        Args:
            name: of the tensor.
            of_heads: it is to be of a dtype that heads are stored in, and finite.

        Raises:
            ValueError: its file is missing or damaged, or it is not what it is to be.
        """
        file, path = self._file(name)
        if of_heads:
            dtype = file.dtype(name) if isinstance(file, SafeFile) else file[name].dtype
            _check_dtype(dtype, name, path)
        if isinstance(file, SafeFile):
            tensor = file.read(name)
        else:
            tensor = _pickled(file, name, path).contiguous().clone()
        if of_heads and tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {name} holds NaN or infinite values: download it anew")
        return tensor

    def _file(self, name: str) -> tuple[Mapping[str, Tensor] | SafeFile, Path]:
        path = self.files[name]
        if isinstance(path, str):  # a shard that the index names, not yet fetched
            found = self.place.find(path)
            if found is None:
                raise ValueError(
                    f"{self.name!r} lacks {path}, which its index names for {name}: download it "
                    "anew"
                )
            path = found
        if path not in self._opened:
            self._opened[path] = _open(path)
        file = self._opened[path]
        if name not in (file.names if isinstance(file, SafeFile) else file):
            raise ValueError(f"{path} does not hold {name}, which the index promises: damaged")
        return file, path


def open_source(name_or_path: str, *, revision: str | None = None, model: bool = False) -> Source:
    """Find the heads (or the model with heads in it) at a path or hub id.

    Args:
        name_or_path: a file, a folder, or a repository.
        revision: of a repository.
        model: look for a whole model alone.

    Raises:
        ValueError: nothing is there, or nothing that holds tensors.
    """
    path = expanded(name_or_path)
    if path.is_file():
        place = Place(str(path.parent.resolve()), path.parent)
        files: dict[str, Path | str] = dict.fromkeys(_names(path), path)
        return Source(str(path.resolve()), _config(place), files, place)
    if path.is_dir():
        place = Place(str(path.resolve()), path)
    else:
        repo_id, named = split_revision(name_or_path)
        old_model = model and "/" not in name_or_path  # gpt2
        if not is_repo_id(repo_id) and not old_model:
            raise ValueError(
                f"expected a checkpoint (a file, a folder or a hub id) at {name_or_path!r}, found "
                "none"
            )
        if named is not None and revision not in (None, named):
            raise ValueError(f"got two revisions, {named!r} and {revision!r}: give one")
        place = Place(repo_id, None, named or revision)
    return Source(place.name, _config(place), _files(place, () if model else HEADS_FILES), place)


class Place:
    """Files by name, in a folder or in a repository of the hub."""

    def __init__(self, name: str, folder: Path | None, revision: str | None = None) -> None:
        self.name, self.folder, self.revision = name, folder, revision

    def find(self, file: str) -> Path | None:
        """The path of a file, fetched if need be; None where there is no such file.

        Raises:
            ValueError: the repository cannot be had, or the name leads out of the folder.
        """
        if Path(file).name != file:  # an index may be anyone's
            raise ValueError(f"{self.name!r} names a file outside its folder: {file!r}")
        if self.folder is not None:
            path = self.folder / file
            return path if path.is_file() else None
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
        from transformers.utils.hub import extract_commit_hash

        with in_one_sentence(self.name, self.revision):
            try:
                found = hf_hub_download(self.name, file, revision=self.revision)
            except EntryNotFoundError as error:
                # Not cached is not absent, but where the hub must not be asked.
                if isinstance(error, LocalEntryNotFoundError) and not constants.HF_HUB_OFFLINE:
                    raise
                return None
        # From here on all files come from the commit of the first.
        self.revision = extract_commit_hash(found, None) or self.revision
        return Path(found)


class SafeFile:
    """A safetensors file whose header has been read."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file: Any = safe_open(path, "pt")
            self.names = set(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Source.shape`."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> object:
        """Of a tensor; in the file's own word where heads are not stored in it."""
        word = self._file.get_slice(name).get_dtype()
        return _SAFETENSORS_DTYPES.get(word, word)

    def read(self, name: str) -> Tensor:
        """See `Source.read`."""
        from safetensors import SafetensorError

        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(self.path, error) from error
        return tensor


def _files(place: Place, heads_files: tuple[str, ...]) -> dict[str, Path | str]:
    for file in heads_files:
        if found := place.find(file):
            files: dict[str, Path | str] = dict.fromkeys(_names(found), found)
            if matrix := place.find(VOCAB_MATRIX_FILE):
                files |= dict.fromkeys(_names(matrix), matrix)
            return files
    for file in MODEL_FILES:
        found = place.find(file)
        if found is not None:
            return (
                _indexed(found) if found.suffix == ".json" else dict.fromkeys(_names(found), found)
            )
    others = [] if place.folder is None else sorted(place.folder.glob("*.safetensors"))
    if len(others) == 1:
        return dict.fromkeys(_names(others[0]), others[0])
    known = ", ".join((*heads_files, *MODEL_FILES))
    raise ValueError(
        f"{place.name!r} holds no weights: expected one of {known}"
        + (f", or one other .safetensors file, got {len(others)}" if others else "")
    )


def _indexed(path: Path) -> dict[str, Path | str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise ValueError(f"{path} does not say which file holds which tensor: it is damaged")
    return dict(weight_map)


def _config(place: Place) -> dict[str, Any]:
    path = place.find(CONFIG_FILE)
    return {} if path is None else read_json(path)


def _names(path: Path) -> list[str]:
    opened = _open(path)
    return sorted(opened.names if isinstance(opened, SafeFile) else opened)


def _open(path: Path) -> Mapping[str, Tensor] | SafeFile:
    if path.suffix == ".safetensors":
        return SafeFile(path)
    if path.suffix not in (".pt", ".bin", ".pth"):
        raise ValueError(f"{path} is none of .safetensors, .pt, .bin: heads are not stored in such")
    try:
        # Mapped, not read; `weights_only` runs none of the code that a pickle may carry.
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # of what may go wrong in a pickle there is no list
        raise _unreadable(path, error) from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise ValueError(f"{path} holds other things than tensors by name: no heads' weights")
    return content


def _pickled(file: Mapping[str, Tensor], name: str, path: Path) -> Tensor:
    tensor = file[name]
    if tensor.layout != torch.strided:
        raise ValueError(f"{path}: {name} is stored as {tensor.layout}, expected a plain tensor")
    # A view may claim any size over a few bytes of storage.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"{path}: {name} claims more values than the file holds: it is damaged")
    return tensor


def _check_dtype(dtype: object, name: str, path: Path) -> None:
    if dtype not in DTYPES:
        known = sorted(str(known).removeprefix("torch.") for known in DTYPES)
        raise ValueError(
            f"{path}: {name} is stored as {str(dtype).removeprefix('torch.')}, expected one of "
            f"{known}: convert heads that are not quantised"
        )


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
    return ValueError(f"{path} cannot be read ({reason}): download it anew")
