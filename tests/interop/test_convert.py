"""Every layout, read: the same values bit for bit, and heads that decode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from medusa_heads import TargetModel
from medusa_heads.checkpoint.stored_heads import read_sidecar, read_stored
from medusa_heads.interop.convert import Converted, convert_heads
from tests.conftest import TinyLlama
from tests.interop import layouts
from tests.interop.conftest import Decodes
from tests.interop.layouts import V, assert_same_bits, native_tensors
from tests.pairs import alternately

MERGED = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "before/it"}
MODELOPT = {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1}}


def assert_holds(converted: Converted, expected: dict[str, Tensor]) -> None:
    assert_same_bits(read_stored(converted.folder).tensors, expected)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16, torch.float32]
)
def test_an_old_pickle_of_five_heads_whose_config_says_two(
    tmp_path: Path, target: Path, decodes: Decodes, dtype: torch.dtype
) -> None:
    planted = native_tensors(5, dtype=dtype)
    source = layouts.fasterdecoding_pt(tmp_path / "old", planted)
    converted = convert_heads(source, tmp_path / "out", target=str(target))
    assert converted.format == "fasterdecoding" and converted.stored.config.num_heads == 5
    (notice,) = converted.notices
    assert "medusa_num_heads: 2" in notice and "hold 5" in notice
    assert_holds(converted, planted)
    decodes(converted.folder)


def test_the_fingerprint_comes_from_the_targets_files(tmp_path: Path, target: Path) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "old", native_tensors(2))
    convert_heads(source, tmp_path / "out", target=str(target))
    expected = TargetModel.from_pretrained(str(target)).fingerprint()
    named = {"name_or_path": str(target), "revision": None}
    assert read_sidecar(tmp_path / "out")["target"] == named | expected


@pytest.mark.parametrize(
    "settings", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}], ids=str
)
def test_a_tied_lm_head_is_found(
    tmp_path: Path, tiny_llama: TinyLlama, settings: dict[str, bool]
) -> None:
    tiny_llama(**settings).save_pretrained(tmp_path / "target", max_shard_size="60KB")
    assert (tmp_path / "target" / "model.safetensors.index.json").is_file()
    source = layouts.fasterdecoding_pt(tmp_path / "old", native_tensors(2))
    convert_heads(source, tmp_path / "out", target=str(tmp_path / "target"))
    expected = TargetModel.from_pretrained(str(tmp_path / "target")).fingerprint()
    got = read_sidecar(tmp_path / "out")["target"]
    assert {key: got[key] for key in expected} == expected


def test_without_a_target_the_config_names_it(tmp_path: Path, target: Path) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "old", native_tensors(2))
    converted = convert_heads(source, tmp_path / "out")
    named = read_sidecar(tmp_path / "out")["target"]
    assert named["name_or_path"] == layouts.BASE and named["lm_head_sha256"] is None
    assert any("--target" in notice for notice in converted.notices)


def test_a_file_alone(tmp_path: Path, target: Path, decodes: Decodes) -> None:
    planted = native_tensors(2)
    source = layouts.fasterdecoding_pt(tmp_path / "old", planted)
    (source / "config.json").unlink()
    converted = convert_heads(source / "medusa_lm_head.pt", tmp_path / "out")
    assert any("name no target" in notice for notice in converted.notices)
    assert_holds(converted, planted)
    decodes(converted.folder, str(target))


def test_shared_matrices_in_safetensors(tmp_path: Path, target: Path, decodes: Decodes) -> None:
    planted = native_tensors(3, own=False)
    source = layouts.fasterdecoding_v2(tmp_path / "v2", planted, version="2", medusa_num_heads=3)
    converted = convert_heads(source, tmp_path / "out", target=str(target))
    assert converted.stored.config.vocab_matrix == "shared" and converted.notices == ()
    assert_holds(converted, planted)
    assert not (tmp_path / "out" / "vocab_matrix.safetensors").exists()
    decodes(converted.folder)
    # What vLLM wants beside such heads.
    wanted = convert_heads(
        source, tmp_path / "more", target=str(target), with_vocab_matrix=True
    ).folder
    matrix = load_file(wanted / "vocab_matrix.safetensors")["lm_heads.0.weight"]
    assert torch.equal(matrix, load_file(target / "model.safetensors")["lm_head.weight"])
    decodes(wanted)


def test_shared_matrices_need_a_vocabulary_size(tmp_path: Path) -> None:
    source = layouts.fasterdecoding_v2(tmp_path / "v2", native_tensors(3, own=False))
    with pytest.raises(ValueError, match="give the target"):
        convert_heads(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_heads_without_biases_have_zeros(tmp_path: Path, target: Path, decodes: Decodes) -> None:
    planted = native_tensors(2, 2, bias=False, dtype=torch.float16)
    source = layouts.fasterdecoding_v2(tmp_path / "old", planted)
    converted = convert_heads(source, tmp_path / "out", target=str(target))
    assert any("no biases" in notice for notice in converted.notices)
    zeros = {
        f"{i}.{layer}.linear.bias": torch.zeros(64, dtype=torch.float16)
        for i in range(2)
        for layer in range(2)
    }
    assert_holds(converted, planted | zeros)
    decodes(converted.folder)


@pytest.mark.parametrize(("prefix", "layers"), alternately(["", "medusa_heads."], [1, 2]))
def test_vllm(tmp_path: Path, target: Path, decodes: Decodes, prefix: str, layers: int) -> None:
    planted = native_tensors(3, layers)
    source = layouts.vllm(tmp_path / "vllm", planted, prefix=prefix)
    converted = convert_heads(source, tmp_path / "out", target=str(target))
    assert converted.format == "vllm" and converted.notices == ()
    assert_holds(converted, planted)
    decodes(converted.folder)


def test_vllm_with_a_shared_matrix(tmp_path: Path, target: Path, decodes: Decodes) -> None:
    matrix_VD = load_file(target / "model.safetensors")["lm_head.weight"]
    planted = native_tensors(3, own=False)
    source = layouts.vllm(tmp_path / "vllm", planted, matrix_VD=matrix_VD)
    converted = convert_heads(source, tmp_path / "out")
    assert_holds(converted, planted)
    # The matrix is the target's, so that its hash is known without the target.
    expected = TargetModel.from_pretrained(str(target)).fingerprint()["lm_head_sha256"]
    assert converted.stored.target["lm_head_sha256"] == expected
    decodes(converted.folder, str(target))
    with pytest.raises(ValueError, match="not that of the target"):
        other = layouts.vllm(tmp_path / "other", planted, matrix_VD=matrix_VD + 1)
        convert_heads(other, tmp_path / "no", target=str(target))


@pytest.mark.parametrize("full", [False, True], ids=["rows of the map", "whole matrix"])
def test_a_token_map_is_a_reduced_vocabulary(
    tmp_path: Path, target: Path, decodes: Decodes, full: bool
) -> None:
    matrix_VD = load_file(target / "model.safetensors")["lm_head.weight"]
    token_map = torch.tensor([150, 3, 42, 7, 198])  # by frequency, not by id
    planted = native_tensors(2, own=False)
    source = layouts.vllm(
        tmp_path / "vllm",
        planted,
        matrix_VD=matrix_VD if full else matrix_VD[token_map],
        token_map=token_map,
    )
    converted = convert_heads(source, tmp_path / "out", target=str(target))
    assert converted.stored.config.draft_vocab_size == 5
    assert_holds(converted, planted | {"draft_tokens": torch.tensor([3, 7, 42, 150, 198])})
    decodes(converted.folder)


def test_a_token_map_with_own_matrices(tmp_path: Path, target: Path, decodes: Decodes) -> None:
    token_map = torch.tensor([150, 3, 42])
    planted = native_tensors(2)
    cut = {name: t[token_map] if t.shape[0] == V else t for name, t in planted.items()}
    source = layouts.vllm(tmp_path / "vllm", cut, token_map=token_map)
    converted = convert_heads(source, tmp_path / "out", target=str(target))
    ordered = torch.tensor([3, 42, 150])
    expected = {name: t[ordered] if t.shape[0] == V else t for name, t in planted.items()}
    assert_holds(converted, expected | {"draft_tokens": ordered})
    decodes(converted.folder)


@pytest.mark.parametrize(
    ("name", "prefix", "config", "layers", "shards"),
    [
        ("merged", "medusa_head.", MERGED, 2, 3),
        pytest.param("modelopt", "medusa_heads.", MODELOPT, 1, 1, marks=pytest.mark.slow),
        pytest.param("merged", "medusa_head.", MERGED, 2, 1, marks=pytest.mark.slow),
        pytest.param("modelopt", "medusa_heads.", MODELOPT, 1, 3, marks=pytest.mark.slow),
    ],
)
def test_whole_models(
    tmp_path: Path,
    target: Path,
    decodes: Decodes,
    shards: int,
    name: str,
    prefix: str,
    config: dict[str, object],
    layers: int,
) -> None:
    planted = native_tensors(3, layers)
    source = layouts.whole_model(tmp_path / "whole", target, planted, prefix, config, shards=shards)
    converted = convert_heads(source, tmp_path / "out")
    assert converted.format == name and converted.notices == ()
    assert_holds(converted, planted)
    # The heads' target is the model they lie in, whatever it was made of.
    assert converted.stored.target["name_or_path"] == str(source)
    decodes(converted.folder)

    extracted = convert_heads(source, tmp_path / "two", extract_target=True)
    assert extracted.stored.target["name_or_path"] == str(tmp_path / "two" / "target")
    decodes(extracted.folder)
    assert "medusa" not in (tmp_path / "two" / "target" / "config.json").read_text()
    index = json.loads((tmp_path / "two/target/model.safetensors.index.json").read_text())
    alone = {
        key: tensor
        for file in set(index["weight_map"].values())
        for key, tensor in load_file(tmp_path / "two" / "target" / file).items()
    }
    before = load_file(target / "model.safetensors")
    assert sorted(alone) == sorted(before)
    assert all(torch.equal(alone[key], before[key]) for key in before)


def test_a_merged_model_in_pickled_shards(tmp_path: Path, target: Path, decodes: Decodes) -> None:
    planted = native_tensors(3, 2)
    source = layouts.whole_model(tmp_path / "whole", target, planted, "medusa_head.", MERGED)
    every = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number, names in enumerate((sorted(every)[:9], sorted(every)[9:])):
        file = f"pytorch_model-{number}.bin"
        torch.save({name: every[name] for name in names}, source / file)
        weight_map |= dict.fromkeys(names, file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    converted = convert_heads(source, tmp_path / "out", extract_target=True)
    assert_holds(converted, planted)
    decodes(converted.folder)


def test_a_merged_model_of_unsaid_numbers(tmp_path: Path, target: Path) -> None:
    planted = native_tensors(4)
    source = layouts.whole_model(tmp_path / "whole", target, planted, "medusa_head.", {})
    assert_holds(convert_heads(source, tmp_path / "out"), planted)


def test_another_lm_head_than_the_merged_models_is_refused(
    tmp_path: Path, target: Path, tiny_llama: TinyLlama
) -> None:
    source = layouts.whole_model(
        tmp_path / "whole", target, native_tensors(3, 2), "medusa_head.", MERGED
    )
    tiny_llama(seed=5).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="another lm_head"):
        convert_heads(source, tmp_path / "out", target=str(tmp_path / "other"))
    assert convert_heads(source, tmp_path / "out", target=str(target)).notices == ()


def test_an_explicit_layout(tmp_path: Path) -> None:
    source = layouts.fasterdecoding_v2(tmp_path / "tgi", native_tensors(2))
    assert convert_heads(source, tmp_path / "out", source_format="tgi").format == "tgi"
    with pytest.raises(ValueError, match="not in the layout 'vllm': it looks like 'fasterdec"):
        convert_heads(source, tmp_path / "no", source_format="vllm")


def test_a_revision_of_what_lies_here_is_refused(tmp_path: Path) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "old", native_tensors(2))
    for place in (source, source / "medusa_lm_head.pt"):
        with pytest.raises(
            ValueError, match=r"a revision \('v2'\) is of a repository as user/name"
        ):
            convert_heads(place, tmp_path / "out", revision="v2")


def test_hub_ids_are_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    """Offline, as all tests are, a repository is what its cache holds."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--user--old"
    layouts.fasterdecoding_pt(repository / "snapshots" / commit, native_tensors(2))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    converted = convert_heads("user/old", tmp_path / "out", target=str(target))
    assert converted.stored.config.num_heads == 2
    assert read_sidecar(tmp_path / "out")["provenance"]["converted_from"] == {
        "format": "fasterdecoding",
        "source": "user/old",
    }
    with pytest.raises(ValueError, match=r"^no weights of 'user/none' are in the local cache"):
        convert_heads("user/none", tmp_path / "no")
