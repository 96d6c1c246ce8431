"""Foreign checkpoints, damaged at random: refused in one sentence, or loaded whole; and vLLM's
layout where it says too little, or two things at once."""

from __future__ import annotations

import json
import pickle
import random
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.interop.convert import convert_heads
from tests.interop import layers, layouts
from tests.interop.layouts import D, V, native_tensors
from tests.interop.test_refusals import refused
from tests.pairs import alternately, with_slow

LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "pickle": lambda folder: layouts.fasterdecoding_pt(folder, native_tensors(2)),
    "safetensors": lambda folder: layouts.fasterdecoding_v2(folder, native_tensors(2)),
    "vllm": lambda folder: layouts.vllm(
        folder,
        native_tensors(2, own=False),
        matrix_VD=layouts.values(5, D, seed=1),
        token_map=torch.tensor([9, 3, 4, 70, 5]),
    ),
    "hydra": lambda folder: layouts.hydra(folder, layouts.hydra_tensors(2, 1, grounded=True)),
    **{
        name: partial(lambda named, folder: layers.written(folder, *named), named)
        for name, named in layers.PUBLISHED.items()
    },
}


def bits(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.choice([1, 50])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def header(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(3):
        data[rng.randrange(min(len(data), 600))] = rng.randrange(256)
    return data


def cut(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def attempt(source: Path, out: Path) -> bool:
    """Whether a source was loaded, and reads back; else one sentence refused it."""
    try:
        converted = convert_heads(source, out)
    except ValueError as error:
        assert "\n" not in str(error)
        assert not out.exists()
        return False
    assert all(t.isfinite().all() for t in read_stored(converted.folder).tensors.values())
    return True


@pytest.mark.parametrize(
    ("layout", "damage"),
    alternately(LAYOUTS, [bits, header, cut]),
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_bytes(
    tmp_path: Path, layout: str, damage: Callable[[bytearray, random.Random], bytearray]
) -> None:
    rng = random.Random(layout)
    loaded = 0
    for number in range(8):
        source = LAYOUTS[layout](tmp_path / f"source{number}")
        path = rng.choice(sorted(source.iterdir()))
        path.write_bytes(bytes(damage(bytearray(path.read_bytes()), rng)))
        loaded += attempt(source, tmp_path / f"out{number}")
    assert loaded < 8  # some of it was noticed


VALUES: list[Any] = [None, True, 0, -1, 2.5, 10**30, "", "x", [], [1], {}, {"num_heads": []}]


@pytest.mark.parametrize("layout", with_slow(list(LAYOUTS)[:-1], list(LAYOUTS)[-1:]))
def test_values_of_configurations(tmp_path: Path, layout: str) -> None:
    source = LAYOUTS[layout](tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    assert attempt(source, tmp_path / "whole")
    keys = [*config, "medusa", "grounded_heads", "hidden_state_offset", "version"]
    for place, key in enumerate(keys):
        for number, value in enumerate(VALUES[place % 12 :: 12]):
            layouts.write_config(source, config | {key: value})
            out = tmp_path / f"{key}{number}"
            if attempt(source, out):
                before = read_stored(tmp_path / "whole").tensors
                layouts.assert_same_bits(read_stored(out).tensors, before)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "model_type", "dtype"])
def test_configurations_of_models_with_heads(tmp_path: Path, target: Path, key: str) -> None:
    planted = native_tensors(2)
    values: list[Any] = [None, 0, 10**30, "x", [1], {"a": []}]
    for number, value in enumerate(values):
        source = layouts.whole_model(
            tmp_path / "source", target, planted, "medusa_head.", {key: value}
        )
        out = tmp_path / str(number)
        if attempt(source, out):
            layouts.assert_same_bits(read_stored(out).tensors, planted)


BYTES = b"\x80\x02c__builtin__\nbytearray\nM\xe8\x03\x85R."  # bytearray(1000)


def zipped(path: Path) -> None:
    """A file of torch's whose pickle is another one."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in parts.items():
            archive.writestr(name, BYTES if name.endswith("data.pkl") else data)


def in_a_row(path: Path) -> None:
    """The same as torch wrote it once."""
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
    path.write_bytes(magic + pickle.dumps(1001, protocol=2) + pickle.dumps({}, protocol=2) + BYTES)


@pytest.mark.parametrize("way", [zipped, in_a_row])
def test_a_pickle_that_takes_memory_by_a_number(
    tmp_path: Path, way: Callable[[Path], None]
) -> None:
    source = LAYOUTS["pickle"](tmp_path / "source")
    way(source / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="its pickle asks for '__builtin__ bytearray', which weig"):
        convert_heads(source, tmp_path / "out")


def test_old_pickles_of_weights_are_read(tmp_path: Path) -> None:
    tensors = native_tensors(2)
    source = layouts.fasterdecoding_pt(tmp_path / "source", tensors)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    for number, old in enumerate((True, False)):
        file = source / "medusa_lm_head.pt"
        torch.save(parameters, file, _use_new_zipfile_serialization=not old)
        made = convert_heads(source, tmp_path / f"out{number}")
        layouts.assert_same_bits(read_stored(made.folder).tensors, tensors)


def test_an_old_pickle_claims_a_storage_that_it_has_not(tmp_path: Path) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "source", native_tensors(1))
    file = source / "medusa_lm_head.pt"
    tensors = {"0.0.linear.weight": torch.zeros(D, D), "0.0.linear.bias": torch.zeros(D)}
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    pickled = file.read_bytes()
    keys = pickled.rindex(b"\x80\x02]")  # of the storages that follow
    file.write_bytes(pickled[:keys] + pickle.dumps([], protocol=2))
    with pytest.raises(ValueError, match="claims more values than the file holds"):
        convert_heads(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("token_map", "message"),
    [
        ([3, 3, 7], "different token ids"),
        ([3, 7, 199], "from 0 to 198"),
        ([-1, 3, 7], "from 0 to 198"),
    ],
    ids=str,
)
def test_token_maps_that_name_no_tokens(tmp_path: Path, token_map: list[int], message: str) -> None:
    matrix_VD = layouts.values(3, D, seed=1)
    source = layouts.vllm(
        tmp_path / "source",
        native_tensors(2, own=False),
        matrix_VD=matrix_VD,
        token_map=torch.tensor(token_map),
    )
    assert message in refused(source, tmp_path)


def test_vllms_config_without_its_matrices(tmp_path: Path) -> None:
    heads = native_tensors(2, own=False)
    source = layouts.vllm(tmp_path / "a", heads)
    assert "holds no lm_heads" in refused(source, tmp_path)
    source = layouts.vllm(tmp_path / "b", heads, original_lm_head=True)
    assert "got no matrix" in refused(source, tmp_path)


@pytest.mark.parametrize("twice", ["blocks.0.layers.0.bias", "lm_heads.0.weight"])
def test_a_place_taken_twice(tmp_path: Path, twice: str) -> None:
    source = layouts.vllm(
        tmp_path / "source",
        native_tensors(2, own=False),
        matrix_VD=layouts.values(V, D, seed=1),
        prefix="medusa_heads.",
    )
    tensors = load_file(source / "model.safetensors")
    tensors[twice] = tensors[f"medusa_heads.{twice}".replace("lm_heads.0", "lm_head")] + 1
    save_file(tensors, source / "model.safetensors")
    assert "stands where another tensor does" in refused(source, tmp_path)


def test_vllms_silent_loss_of_biases_is_told(tmp_path: Path) -> None:
    source = layouts.vllm(tmp_path / "source", native_tensors(2), medusa_fc_bias=False)
    converted = convert_heads(source, tmp_path / "out")
    assert any("medusa_fc_bias" in notice for notice in converted.notices)
    assert torch.equal(converted.stored.tensors["0.0.linear.bias"], layouts.values(D, seed=1))
