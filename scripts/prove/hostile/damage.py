"""What may happen to a checkpoint of heads between its writing and its reading."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_heads.checkpoint.stored_heads import SIDECAR_FILE, WEIGHTS_FILE
from medusa_heads.target.fingerprint import file_sha256
from scripts.prove.hostile.values import change_one


def flip_bit(folder: Path, chance: random.Random) -> None:
    """Anywhere in the weights file, header or tensors."""
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    (folder / WEIGHTS_FILE).write_bytes(data)


def flip_bit_unnoticed(folder: Path, chance: random.Random) -> None:
    """The same, and the checksum with it: only what the header says can be compared. In the header
    the flip is likelier to do harm."""
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[chance.randrange(header)] ^= 1 << chance.randrange(8)
    (folder / WEIGHTS_FILE).write_bytes(data)
    vouch(folder)


def truncate(folder: Path, chance: random.Random) -> None:
    """The weights or the sidecar end too early."""
    name = chance.choice([WEIGHTS_FILE, SIDECAR_FILE])
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: chance.randrange(len(data))])


def change_tensor(folder: Path, chance: random.Random) -> None:
    """Shape, dtype, values, name or presence of one tensor, with the right checksum."""
    tensors = load_file(folder / WEIGHTS_FILE)
    name = chance.choice(sorted(tensors))
    tensor = tensors.pop(name)
    match chance.randrange(8):
        case 0:
            tensors["surplus." + name] = tensor
        case 1:
            tensors[name] = tensor.unsqueeze(0)
        case 2:
            tensors[name] = tensor[:-1].clone()
        case 3:
            tensors[name] = torch.cat([tensor, tensor])
        case 4:
            tensors[name] = tensor.double()
        case 5:
            tensors[name] = torch.full_like(tensor, -7)
        case 6:
            value = chance.choice([float("nan"), float("inf")])
            tensors[name] = torch.full_like(tensor, value, dtype=torch.float32)
        case 7:
            tensors |= {name: tensor, "9.0.linear.weight": torch.zeros(2)}
    save_file(tensors, folder / WEIGHTS_FILE)
    vouch(folder)


def change_sidecar(folder: Path, chance: random.Random) -> None:
    """One value of the sidecar, at any depth, replaced or taken away."""
    sidecar = change_one(json.loads((folder / SIDECAR_FILE).read_text()), chance)
    if chance.random() < 0.1:
        sidecar["unheard_of"] = 1
    (folder / SIDECAR_FILE).write_text(json.dumps(sidecar))


def change_sidecar_bytes(folder: Path, chance: random.Random) -> None:
    """One byte of the sidecar."""
    data = bytearray((folder / SIDECAR_FILE).read_bytes())
    data[chance.randrange(len(data))] = chance.randrange(256)
    (folder / SIDECAR_FILE).write_bytes(data)


def vouch(folder: Path) -> None:
    """Write the checksum of the weights that lie there."""
    sidecar = json.loads((folder / SIDECAR_FILE).read_text())
    sidecar["weights_sha256"] = file_sha256(folder / WEIGHTS_FILE)
    (folder / SIDECAR_FILE).write_text(json.dumps(sidecar))


def same_tensors(got: Mapping[str, Tensor], expected: Mapping[str, Tensor] | None) -> bool:
    """Whether the values are those of a file that could be read, in whatever dtype."""
    return (
        expected is not None
        and got.keys() == expected.keys()
        and all(torch.equal(got[name], expected[name].to(got[name].dtype)) for name in got)
    )


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    flip_bit,
    flip_bit_unnoticed,
    truncate,
    change_tensor,
    change_sidecar,
    change_sidecar_bytes,
]
