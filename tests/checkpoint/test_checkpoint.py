"""Checkpoint folders: round trips, the wrong target, and damage."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_heads.checkpoint.checkpoint import load_heads, replace_statistics, save_heads
from medusa_heads.checkpoint.files import VOCAB_MATRIX_FILE
from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.checkpoint.stored_heads import CONFIG_FILE, SIDECAR_FILE, WEIGHTS_FILE
from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.target.fingerprint import file_sha256
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics, prior_statistics
from tests.conftest import TinyLlama


@pytest.fixture
def target(tiny_llama: TinyLlama) -> TargetModel:
    return TargetModel(tiny_llama())


def trained(target: TargetModel, **config: object) -> DraftHeads:
    size = config.get("draft_vocab_size")
    tokens_V = torch.randperm(199)[:size] if isinstance(size, int) else None
    heads = new_heads(target, HeadsConfig(**config), tokens_V)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return heads


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_matrix": "shared"},
        {"vocab_matrix": "own"},
        {"vocab_matrix": "own", "draft_vocab_size": 20},
        {"kind": "hydra", "draft_vocab_size": 20},
        {"kind": "hydra", "prefix_attention": True},
        {"kind": "eagle3", "draft_vocab_size": 20},
        {"kind": "eagle3", "vocab_matrix": "own"},
        {"kind": "eagle3", "decoder": replace(DecoderShape.of_width(64), norm_output=True)},
        {"kind": "block", "vocab_matrix": "own", "correction_rank": 4},
        {"correction_rank": 4, "draft_vocab_size": 20},
        {"features": [1, 0]},
        {"linear_shortcut": True},
    ],
    ids=str,
)
def test_round_trip(target: TargetModel, tmp_path: Path, config: dict[str, object]) -> None:
    num_layers = 1 if config.get("kind") == "eagle3" else 2
    heads = trained(target, num_heads=3, num_layers=num_layers, **config)
    statistics = HeadStatistics.from_ranks(torch.tensor([[0, 1, 0], [0, 0, 0]]))
    save_heads(tmp_path, heads, target, statistics=statistics, provenance=provenance({"seed": 4}))
    loaded = load_heads(tmp_path, target)
    assert loaded.heads.config == heads.config
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.heads.state_dict()[name], tensor)
    assert loaded.statistics is not None
    assert loaded.statistics.paths == statistics.paths
    made = loaded.stored.provenance
    assert made["seed"] == 4 and "argv" not in made
    assert made["versions"]["torch"] == version("torch")


@pytest.mark.parametrize("matrix", ["own", "shared"])
def test_folder_holds_heads_alone_in_field_names(
    target: TargetModel, tmp_path: Path, matrix: str
) -> None:
    save_heads(tmp_path, trained(target, num_heads=2, vocab_matrix=matrix), target)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [WEIGHTS_FILE, CONFIG_FILE, SIDECAR_FILE, "custom_generate"]
    )
    own = ["1.weight"] if matrix == "own" else []
    assert sorted(load_file(tmp_path / WEIGHTS_FILE)) == sorted(
        f"{i}.{name}" for i in (0, 1) for name in ("0.linear.bias", "0.linear.weight", *own)
    )
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert config["medusa_num_heads"] == 2 and config["medusa_fc_bias"] is True
    assert "architectures" not in config and "model_type" not in config


def test_shared_matrix_lies_beside_the_heads_where_it_is_asked_for(
    target: TargetModel, tmp_path: Path
) -> None:
    save_heads(tmp_path, trained(target, num_heads=2), target, with_vocab_matrix=True)
    beside = load_file(tmp_path / VOCAB_MATRIX_FILE)
    assert list(beside) == ["lm_heads.0.weight"]
    assert torch.equal(beside["lm_heads.0.weight"], target.get_output_embeddings().weight)
    assert not set(load_file(tmp_path / WEIGHTS_FILE)) & set(target.model.state_dict())
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["original_lm_head"] is True
    # Heads that lie beside it, as they did by default once, are loaded as others are.
    load_heads(tmp_path, target)
    save_heads(tmp_path, trained(target), target)  # in the same place
    assert not (tmp_path / VOCAB_MATRIX_FILE).exists()


def test_a_matrix_that_no_engine_would_read_is_refused(target: TargetModel, tmp_path: Path) -> None:
    for config in ({"vocab_matrix": "own"}, {"kind": "hydra"}, {"linear_shortcut": True}):
        with pytest.raises(ValueError, match="no engine reads it beside others: leave it out"):
            save_heads(tmp_path, trained(target, **config), target, with_vocab_matrix=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "hydra"},
        {"kind": "eagle3"},
        {"kind": "block"},
        {"draft_vocab_size": 20},
        {"prefix_attention": True},
        {"correction_rank": 4},
        {"features": [0]},
        {"linear_shortcut": True},
    ],
    ids=str,
)
def test_heads_that_other_engines_cannot_hold_do_not_pose_as_medusas(
    target: TargetModel, tmp_path: Path, config: dict[str, object]
) -> None:
    save_heads(tmp_path, trained(target, **config), target)
    assert not any("medusa" in key for key in json.loads((tmp_path / CONFIG_FILE).read_text()))


def test_weights_are_stored_in_the_targets_dtype(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    target = TargetModel(tiny_llama().to(torch.bfloat16))
    save_heads(tmp_path, trained(target), target)
    assert {t.dtype for t in load_file(tmp_path / WEIGHTS_FILE).values()} == {torch.bfloat16}
    assert next(load_heads(tmp_path, target).heads.parameters()).dtype == torch.bfloat16


def test_another_target_is_refused(
    target: TargetModel, tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    save_heads(tmp_path, trained(target), target)
    with pytest.raises(ValueError, match="trained for another target") as error:
        load_heads(tmp_path, TargetModel(tiny_llama(seed=9)))
    assert target.fingerprint()["lm_head_sha256"] in str(error.value)
    with pytest.raises(ValueError, match="'hidden_size': 64"):
        load_heads(tmp_path, TargetModel(tiny_llama(hidden_size=32)))


def test_a_target_in_float16_is_known_by_its_sizes(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """Which keeps less of small weights than bf16 does."""
    model = tiny_llama().bfloat16()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e-9
    target = TargetModel(model)
    save_heads(tmp_path, trained(target, num_heads=2), target)
    load_heads(tmp_path, TargetModel(model.half()))
    with pytest.raises(ValueError, match="another target"):
        load_heads(tmp_path, TargetModel(model.bfloat16()))  # with the small weight lost
    with pytest.raises(ValueError, match="another target"):
        load_heads(tmp_path, TargetModel(tiny_llama(vocab_size=150).half()))


def test_no_checkpoint(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a heads checkpoint"):
        load_heads(tmp_path / "nowhere", target)


def damage_truncated(folder: Path) -> None:
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[: len(data) // 2])


def damage_missing_key(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    del tensors["1.0.linear.bias"]
    save_file(tensors, folder / WEIGHTS_FILE)


def damage_shape(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors["0.0.linear.weight"] = tensors["0.0.linear.weight"][:5].clone()
    save_file(tensors, folder / WEIGHTS_FILE)


def damage_nan(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors["0.0.linear.bias"][0] = float("nan")
    save_file(tensors, folder / WEIGHTS_FILE)
    sidecar = json.loads((folder / SIDECAR_FILE).read_text())
    sidecar["weights_sha256"] = file_sha256(folder / WEIGHTS_FILE)
    (folder / SIDECAR_FILE).write_text(json.dumps(sidecar))


def damage_one_bit(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    data[-1] ^= 1  # in the last tensor: still a number, only another
    (folder / WEIGHTS_FILE).write_bytes(data)


def damage_weights_gone(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()


def damage_json(folder: Path) -> None:
    (folder / SIDECAR_FILE).write_text("{")


def damage_kind_of_value(folder: Path) -> None:
    sidecar = json.loads((folder / SIDECAR_FILE).read_text())
    sidecar["heads"]["raw_embeddings"] = {"no": 1}
    (folder / SIDECAR_FILE).write_text(json.dumps(sidecar))


def damage_name(folder: Path) -> None:
    sidecar = json.loads((folder / SIDECAR_FILE).read_text())
    sidecar["target"]["revision"] = ["main"]
    (folder / SIDECAR_FILE).write_text(json.dumps(sidecar))


def damage_newer(folder: Path) -> None:
    (folder / SIDECAR_FILE).write_text('{"format_version": 99}')


def damage_no_heads_part(folder: Path) -> None:
    (folder / SIDECAR_FILE).write_text('{"format_version": 1}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncated, "cannot be read"),
        (damage_missing_key, "missing \\['1.0.linear.bias'\\]"),
        (damage_shape, "has shape"),
        (damage_nan, "NaN"),
        (damage_one_bit, "its checksum differs"),
        (damage_weights_gone, "found none"),
        (damage_json, "not valid JSON"),
        (damage_kind_of_value, "raw_embeddings must be true or false"),
        (damage_name, r"says \['main'\] for the target's 'revision'"),
        (damage_newer, "upgrade"),
        (damage_no_heads_part, "no 'heads' part"),
    ],
)
def test_damage_is_one_sentence(
    target: TargetModel, tmp_path: Path, damage: object, message: str
) -> None:
    save_heads(tmp_path, trained(target), target)
    assert callable(damage)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        load_heads(tmp_path, target)
    assert "\n" not in str(error.value)


def test_a_failed_save_leaves_the_old_checkpoint(target: TargetModel, tmp_path: Path) -> None:
    heads = trained(target)
    save_heads(tmp_path, heads, target)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    with pytest.raises(TypeError):
        save_heads(tmp_path, heads, target, provenance={"not": object()})  # not JSON
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_a_file_that_may_not_grow_is_an_error_of_the_system(
    target: TargetModel, tmp_path: Path
) -> None:
    """As where a quota is used up: safetensors has an error of its own for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written .*too large"):
            save_heads(tmp_path, trained(target), target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_other_statistics_and_nothing_else(target: TargetModel, tmp_path: Path) -> None:
    heads = trained(target)
    save_heads(tmp_path, heads, target, provenance={"argv": ["train-heads"]})
    weights = (tmp_path / WEIGHTS_FILE).read_bytes()
    measured = prior_statistics(heads.config.num_heads)
    replace_statistics(tmp_path, measured, {"text": "letters"})
    loaded = load_heads(tmp_path, target)  # checksum and fingerprint hold
    assert loaded.statistics is not None and loaded.statistics.to_dict() == measured.to_dict()
    assert loaded.stored.provenance == {
        "argv": ["train-heads"],
        "calibrated": {"text": "letters"},
    }
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == weights
    with pytest.raises(ValueError, match="the statistics are of 9"):
        replace_statistics(tmp_path, prior_statistics(9), {})
    assert load_heads(tmp_path, target).statistics is not None
