"""Every layout, written: there and back bit for bit, with exactly the keys that engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_heads import HeadsConfig, TargetModel, new_heads
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.interop import WrittenFormat
from medusa_heads.interop.convert import convert_heads
from medusa_heads.interop.export import export_heads
from tests.conftest import TinyLlama
from tests.interop import layouts
from tests.interop.conftest import Decodes
from tests.interop.layouts import D, V, assert_same_bits, native_tensors
from tests.pairs import alternately

Tensors = dict[str, Tensor]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def there_and_back(source: Path, tmp_path: Path, to: WrittenFormat, **options: Any) -> Path:
    """The source converted, and exported to the layout it came from."""
    native = convert_heads(source, tmp_path / "native", target=options.pop("target", None)).folder
    return export_heads(native, tmp_path / "back", to, **options).folder


@pytest.mark.parametrize("dtype", DTYPES)
def test_fasterdecodings_pickle(tmp_path: Path, dtype: torch.dtype) -> None:
    planted = native_tensors(5, 2, dtype=dtype)
    source = layouts.fasterdecoding_pt(tmp_path / "old", planted)
    back = there_and_back(source, tmp_path, "fasterdecoding")
    assert sorted(path.name for path in back.iterdir()) == ["config.json", "medusa_lm_head.pt"]
    assert_same_bits(torch.load(back / "medusa_lm_head.pt", weights_only=True), planted)
    assert config_of(back) == {
        "base_model_name_or_path": layouts.BASE,
        "medusa_num_heads": 5,
        "medusa_num_layers": 2,
        "hidden_size": D,
        "vocab_size": V,
    }


@pytest.mark.parametrize(
    ("to", "own"),
    [("tgi", True), ("lorax", True), ("tgi", False), ("lorax", False), ("fasterdecoding", False)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_file_of_tgi_and_lorax(
    tmp_path: Path, to: WrittenFormat, own: bool, dtype: torch.dtype
) -> None:
    planted = native_tensors(3, own=own, dtype=dtype)
    source = layouts.fasterdecoding_v2(tmp_path / "old", planted, vocab_size=V)
    back = there_and_back(source, tmp_path, to)
    (file,) = back.glob("*.safetensors")
    assert file.name == "medusa_lm_head.safetensors"
    assert_same_bits(load_file(file), planted)
    config = config_of(back)
    assert config["medusa_num_heads"] == 3 and config["medusa_num_layers"] == 1
    assert config["base_model_name_or_path"] == layouts.BASE
    # TGI takes a folder with architectures for another model; LoRAX computes with the version.
    assert "architectures" not in config and "model_type" not in config
    assert float(config.get("version", 1)) == (1 if own else 2)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_vllm(tmp_path: Path, layers: int, dtype: torch.dtype) -> None:
    planted = native_tensors(3, layers, dtype=dtype)
    source = layouts.vllm(tmp_path / "vllm", planted)
    back = there_and_back(source, tmp_path, "vllm")
    assert_same_bits(load_file(back / "model.safetensors"), load_file(source / "model.safetensors"))
    assert config_of(back) == config_of(source) | {"base_model_name_or_path": None}


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_vllm_with_a_shared_matrix(
    tmp_path: Path, tiny_llama: TinyLlama, reduced: bool, dtype: torch.dtype
) -> None:
    tiny_llama().to(dtype).save_pretrained(tmp_path / "target")
    matrix_VD = load_file(tmp_path / "target" / "model.safetensors")["lm_head.weight"]
    token_map = torch.tensor([3, 7, 42, 150]) if reduced else None
    source = layouts.vllm(
        tmp_path / "vllm",
        native_tensors(3, own=False, dtype=dtype),
        matrix_VD=matrix_VD if token_map is None else matrix_VD[token_map],
        token_map=token_map,
    )
    back = there_and_back(source, tmp_path, "vllm", target=str(tmp_path / "target"))
    assert_same_bits(load_file(back / "model.safetensors"), load_file(source / "model.safetensors"))
    named = {"base_model_name_or_path": str(tmp_path / "target")}
    assert config_of(back) == config_of(source) | named


def test_vllm_takes_no_key_for_another(tmp_path: Path) -> None:
    """It reads any key with "num" and "heads", or "num" and "layers", as the heads' own."""
    source = layouts.vllm(tmp_path / "vllm", native_tensors(3))
    config = config_of(there_and_back(source, tmp_path, "vllm"))
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    assert [key for key in config if "num" in key and "layers" in key] == ["num_hidden_layers"]


@pytest.mark.parametrize("shards", [1, 3])
def test_modelopt(tmp_path: Path, target: Path, decodes: Decodes, shards: int) -> None:
    said = {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1}}
    planted = native_tensors(3)
    source = layouts.whole_model(
        tmp_path / "whole", target, planted, "medusa_heads.", said, shards=shards
    )
    native = convert_heads(source, tmp_path / "native").folder
    back = export_heads(native, tmp_path / "back", "modelopt", target=str(target)).folder
    index = json.loads((back / "model.safetensors.index.json").read_text())
    got: Tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        got |= (part := load_file(back / file))
        assert {index["weight_map"][name] for name in part} == {file}
    expected = load_file(target / "model.safetensors")
    expected |= {f"medusa_heads.{name}": tensor for name, tensor in planted.items()}
    assert_same_bits(got, expected)
    assert config_of(back) == config_of(target) | said
    assert (back / "generation_config.json").is_file()
    # It is a target, too.
    decodes(convert_heads(back, tmp_path / "again").folder)


def saved(folder: Path, target: TargetModel, **config: Any) -> Path:
    """Heads as train-heads leaves them, every parameter moved."""
    size = config.get("draft_vocab_size")
    heads = new_heads(
        target, HeadsConfig(num_heads=2, **config), torch.arange(size) if size else None
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return save_heads(folder, heads, target)


def blocks_of(folder: Path) -> Tensors:
    return load_file(folder / "medusa_lm_head.safetensors")


@pytest.mark.parametrize(
    ("matrix", "to"),
    alternately(["shared", "own"], ["tgi", "lorax", "fasterdecoding", "vllm", "modelopt"]),
)
def test_our_own_checkpoints(tmp_path: Path, target: Path, to: WrittenFormat, matrix: str) -> None:
    native = saved(
        tmp_path / "native", TargetModel.from_pretrained(str(target)), vocab_matrix=matrix
    )
    export_heads(native, tmp_path / "out", to)
    again = convert_heads(tmp_path / "out", tmp_path / "again", target=str(target))
    expected = blocks_of(native)
    if matrix == "shared" and to == "modelopt":
        lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
        expected |= {f"{i}.1.weight": lm_head for i in range(2)}
    assert_same_bits(blocks_of(again.folder), expected)
    sha256 = TargetModel.from_pretrained(str(target)).fingerprint()["lm_head_sha256"]
    assert again.stored.target["lm_head_sha256"] == sha256


@pytest.mark.parametrize("to", ["tgi", "lorax"])
def test_several_blocks_with_a_shared_matrix_are_given_copies(
    tmp_path: Path, target: Path, to: WrittenFormat
) -> None:
    model = TargetModel.from_pretrained(str(target))
    native = saved(tmp_path / "native", model, num_layers=2)
    (notice,) = export_heads(native, tmp_path / "out", to).notices
    assert "given a copy" in notice
    assert config_of(tmp_path / "out").get("version") == ("1" if to == "lorax" else None)
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    expected = blocks_of(native) | {f"{i}.2.weight": lm_head for i in range(2)}
    assert_same_bits(blocks_of(tmp_path / "out"), expected)


@pytest.mark.parametrize("to", ["tgi", "vllm", "modelopt"])
def test_a_reduced_vocabulary_made_whole(tmp_path: Path, target: Path, to: WrittenFormat) -> None:
    model = TargetModel.from_pretrained(str(target))
    native = saved(tmp_path / "native", model, draft_vocab_size=20)
    notices = export_heads(native, tmp_path / "out", to, full_vocabulary=True).notices
    assert "never other text" in notices[0]
    again = convert_heads(tmp_path / "out", tmp_path / "again", target=str(target)).stored
    assert again.config.draft_vocab_size is None
    assert torch.equal(again.tensors["1.0.linear.weight"], blocks_of(native)["1.0.linear.weight"])


REFUSED: list[tuple[WrittenFormat, dict[str, Any], str]] = [
    *((to, {"kind": "hydra"}, "holds no hydra heads") for to in ("vllm", "tgi", "modelopt")),
    *((to, {"prefix_attention": True}, "no prefix layer") for to in ("vllm", "lorax")),
    *((to, {"kind": "block"}, "heads: DFlash.*train with features") for to in ("vllm", "tgi")),
    ("vllm", {"correction_rank": 4}, "no correction by the token before"),
    ("vllm", {"linear_shortcut": True}, "no linear shortcut: train without linear_shortcut"),
    *((to, {"features": [0]}, "no features of the target's layers") for to in ("vllm", "tgi")),
    ("tgi", {"draft_vocab_size": 20}, "20 tokens; --full_vocabulary"),
    ("fasterdecoding", {"draft_vocab_size": 20, "vocab_matrix": "own"}, "vocabulary of 20 tokens$"),
    ("vllm", {"draft_vocab_size": 20, "vocab_matrix": "own"}, "vocabulary of 20 tokens$"),
    ("modelopt", {"num_layers": 2}, "one block a head"),
]


@pytest.mark.parametrize(("to", "config", "message"), REFUSED, ids=str)
def test_what_an_engine_cannot_hold_is_named(
    tmp_path: Path, target: Path, to: WrittenFormat, config: dict[str, Any], message: str
) -> None:
    native = saved(tmp_path / "native", TargetModel.from_pretrained(str(target)), **config)
    with pytest.raises(ValueError, match=message):
        export_heads(native, tmp_path / "out", to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native"]


def test_heads_of_an_adapted_target_want_it_merged(tmp_path: Path, target: Path) -> None:
    native = saved(tmp_path / "native", TargetModel.from_pretrained(str(target)))
    sidecar = json.loads((native / "medusa_heads.json").read_text())
    sidecar["adapter"] = {"folder": "adapter", "sha256": "0"}
    (native / "medusa_heads.json").write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match="merge it into the target"):
        export_heads(native, tmp_path / "out", "vllm")
    export_heads(native, tmp_path / "out", "vllm", target=str(target))


def test_biases_in_vocabulary_matrices_are_refused(tmp_path: Path) -> None:
    source = layouts.hydra(tmp_path / "hydra", layouts.hydra_tensors(2, 1, grounded=False))
    convert_heads(source, tmp_path / "native")
    with pytest.raises(ValueError, match="no bias in the heads' vocabulary matrices"):
        export_heads(tmp_path / "native", tmp_path / "out", "vllm")


def test_own_rows_cannot_be_made_whole(tmp_path: Path, target: Path) -> None:
    model = TargetModel.from_pretrained(str(target))
    native = saved(tmp_path / "native", model, draft_vocab_size=20, vocab_matrix="own")
    with pytest.raises(ValueError, match="no rows for other tokens"):
        export_heads(native, tmp_path / "out", "vllm", full_vocabulary=True)


def test_another_target_is_refused(tmp_path: Path, target: Path, tiny_llama: TinyLlama) -> None:
    native = saved(tmp_path / "native", TargetModel.from_pretrained(str(target)))
    tiny_llama(seed=9).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="another target"):
        export_heads(native, tmp_path / "out", "tgi", target=str(tmp_path / "other"))
    moved = export_heads(native, tmp_path / "moved", "tgi", target=str(target))
    assert config_of(moved.folder)["base_model_name_or_path"] == str(target)


def test_a_target_that_nobody_names(tmp_path: Path) -> None:
    source = layouts.vllm(tmp_path / "vllm", native_tensors(2))
    convert_heads(source, tmp_path / "native")
    with pytest.raises(ValueError, match="they name none"):
        export_heads(tmp_path / "native", tmp_path / "out", "tgi")


def test_the_matrix_is_the_targets_whatever_lies_beside_the_heads(
    tmp_path: Path, target: Path
) -> None:
    native = saved(tmp_path / "native", TargetModel.from_pretrained(str(target)))
    path = native / "vocab_matrix.safetensors"
    assert not path.exists()
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    export_heads(native, tmp_path / "none", "vllm")
    save_file({"lm_heads.0.weight": lm_head}, path)
    export_heads(native, tmp_path / "copy", "vllm")
    save_file({"lm_heads.0.weight": lm_head + 1}, path)
    export_heads(native, tmp_path / "other", "vllm")
    for name in ("none", "copy", "other"):
        written = load_file(tmp_path / name / "model.safetensors")["lm_head.weight"]
        assert torch.equal(written, lm_head), name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="cannot be read"):
        export_heads(native, tmp_path / "damaged", "vllm")


def test_without_the_target_the_copy_serves(tmp_path: Path, target: Path) -> None:
    """As lay beside all such heads once."""
    native = saved(tmp_path / "native", TargetModel.from_pretrained(str(target)))
    file = native / "medusa_heads.json"
    sidecar = json.loads(file.read_text())
    sidecar["target"]["name_or_path"] = str(tmp_path / "gone")
    file.write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match="gone"):
        export_heads(native, tmp_path / "out", "vllm")
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    save_file({"lm_heads.0.weight": lm_head}, native / "vocab_matrix.safetensors")
    export_heads(native, tmp_path / "out", "vllm")


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a heads checkpoint"):
        export_heads(tmp_path / "none", tmp_path / "out", "vllm")
