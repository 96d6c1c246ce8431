"""Files that say they are safetensors."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from scripts.prove.hostile.values import words

Header = dict[str, Any]


class Touch:
    """A pickle that makes a folder when it is loaded carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def raw(header: bytes, body: bytes, length: int | None = None) -> bytes:
    """A safetensors file of these bytes."""
    said = len(header) if length is None else length
    return struct.pack("<Q", said % 2**64) + header + body


def _parts(path: Path) -> tuple[Header, bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def broken_header(path: Path, rng: random.Random) -> tuple[str, bytes]:
    """The file with a header that lies."""
    header, body = _parts(path)
    names = sorted(name for name in header if name != "__metadata__")
    name, other = rng.choice(names), rng.choice(names)
    entry = header[name]
    begin, end = entry["data_offsets"]
    text = json.dumps(header).encode()
    match rng.randrange(16):
        case 0:
            length = rng.choice([0, 1, 2**63, 2**64 - 1, 10**9, len(text) + rng.randint(1, 10**6)])
            return "a length that lies", raw(text, body, length)
        case 1:
            return "a length cut short", raw(text, body, rng.randrange(1, len(text)))
        case 2:
            entry["data_offsets"] = [begin, end + rng.choice([1, 4, 10**6, 2**62])]
        case 3:
            entry["data_offsets"] = [end, begin]
        case 4:
            entry["data_offsets"] = rng.choice(
                [[-4, end], [begin], [], "x", [0.5, 1], None, [2**70, 2**71]]
            )
        case 5:
            at = rng.choice([each for each in names if header[each]["data_offsets"][0]] or [name])
            first, last = header[at]["data_offsets"]
            header[at]["data_offsets"] = [first - 4, last - 4]
        case 6:
            entry["shape"] = rng.choice(
                [[2**40, 2**40], [0], [-1, 4], [], "x", None, [1.5], [2**63], [[1]]]
            )
        case 7:
            entry["dtype"] = rng.choice(
                ["F64", "I8", "U8", "BOOL", "F8_E4M3", "X", "", None, 5, "C64"]
            )
        case 8:
            header[words(rng, 1, 1) + name] = header.pop(name)
        case 9:
            del header[name]
        case 10:
            header[f"{name}.more"] = dict(entry)
        case 11:
            del entry[rng.choice(sorted(entry))]
        case 12:
            return "no object", raw(
                rng.choice([b"[]", b"null", b"7", b"{", b"", b"\xff" * 9]), body
            )
        case 13:
            return "a name given twice", raw(text[:-1] + b', "%s": {}}' % other.encode(), body)
        case 14:
            return "nested too deeply", raw(b'{"a":' * rng.randint(200, 9000), body)
        case 15:
            header["__metadata__"] = rng.choice([5, [], {"a": 5}, {"a": {}}, "x"])
    return "a header that lies", raw(json.dumps(header).encode(), body)


def no_safetensors(path: Path, rng: random.Random, marker: Path) -> str:
    """Something else under the name of a safetensors file."""
    tensors = load_file(path)
    path.unlink()
    case = rng.choice(
        [
            "a pickle",
            "a hostile pickle",
            "a zip",
            "nothing",
            "noise",
            "a folder",
            "a FIFO",
            "a link",
            "text",
        ]
    )
    match case:
        case "a pickle":
            torch.save(tensors, path)
        case "a hostile pickle":
            path.write_bytes(pickle.dumps({"0.0.linear.weight": Touch(marker)}))
        case "a zip":
            with zipfile.ZipFile(path, "w") as packed:
                packed.writestr("../../evil", "x")
        case "nothing":
            path.write_bytes(b"")
        case "noise":
            path.write_bytes(rng.randbytes(rng.randint(1, 400)))
        case "a folder":
            path.mkdir()
        case "a FIFO":
            os.mkfifo(path)
        case "a link":
            path.symlink_to(path.parent / "none")
        case "text":
            path.write_text(words(rng))
    return case
