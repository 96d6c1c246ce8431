"""Foreign checkpoints that are damaged, hostile or none: one sentence, and nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_heads.interop.convert import convert_heads
from tests.conftest import TinyLlama
from tests.interop import layouts
from tests.interop.layouts import D, V, native_tensors

Change = Callable[[dict[str, Tensor]], object]


def refused(source: Path, tmp_path: Path, **options: str) -> str:
    """The sentence with which a source is refused; nothing stands where it would have gone."""
    with pytest.raises(ValueError) as error:
        convert_heads(source, tmp_path / "refused", **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    assert not (tmp_path / "refused").exists()
    return str(error.value)


def with_nan(tensors: dict[str, Tensor]) -> None:
    tensors["1.0.linear.weight"][3, 3] = float("nan")


CHANGES: dict[str, tuple[Change, str]] = {
    "a head left out": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("1.")],
        "head 1 is missing",
    ),
    "a bias left out": (lambda t: t.pop("2.0.linear.bias"), "lacks 2.0.linear.bias"),
    "a matrix left out": (lambda t: t.pop("2.1.weight"), "head 2 has vocabulary matrices at []"),
    "no blocks": (
        lambda t: [t.pop(name) for name in list(t) if "linear" in name],
        "head 0 is missing",
    ),
    "a block too many": (
        lambda t: t.update({"1.1.linear.weight": torch.zeros(D, D)}),
        "head 1 has blocks [0, 1], head 0 has 1",
    ),
    "another width": (
        lambda t: t.update({"1.0.linear.weight": torch.zeros(D, D + 1)}),
        "1.0.linear.weight has shape [64, 65], expected [64, 64]",
    ),
    "no matrix": (
        lambda t: t.update({"0.0.linear.weight": torch.zeros(D * D)}),
        "0.0.linear.weight has shape [4096], expected a matrix",
    ),
    "a scalar": (
        lambda t: t.update({"0.0.linear.weight": torch.tensor(1.0)}),
        "0.0.linear.weight has shape [], expected a matrix",
    ),
    "nothing in it": (
        lambda t: t.update({"0.0.linear.weight": torch.zeros(0, D)}),
        "0.0.linear.weight has shape [0, 64], expected a matrix",
    ),
    "a bias alone": (lambda t: t.pop("0.0.linear.weight"), "lacks 0.0.linear.weight"),
    "other rows": (
        lambda t: t.update({"2.1.weight": torch.zeros(V + 1, D)}),
        "2.1.weight has shape [200, 64], expected [199, 64]",
    ),
    "nan": (with_nan, "1.0.linear.weight holds NaN"),
    "quantised": (
        lambda t: t.update({"1.0.linear.weight": torch.zeros(D, D, dtype=torch.int8)}),
        "stored as",
    ),
    "integers": (
        lambda t: t.update({"1.0.linear.weight": torch.zeros(D, D, dtype=torch.long)}),
        "stored as int64",
    ),
    "a stranger": (
        lambda t: t.update({"optimizer.step": torch.zeros(1)}),
        "optimizer.step is no tensor of FasterDecoding's layout",
    ),
    "an unknown part": (
        lambda t: t.update({"0.0.norm.weight": torch.zeros(D)}),
        "0.0.norm.weight is no tensor of such heads",
    ),
    "sequential blocks": (
        lambda t: t.update({f"{i}.0.res_connection.weight": torch.zeros(D, D) for i in range(3)}),
        "res_connection.weight is no tensor of medusa heads",
    ),
    "a number beyond reason": (
        lambda t: t.update({"999999.0.linear.weight": torch.zeros(D, D)}),
        "head 3 is missing",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", [layouts.fasterdecoding_pt, layouts.fasterdecoding_v2])
def test_tensors_that_do_not_fit(tmp_path: Path, change: str, layout: Callable[..., Path]) -> None:
    tensors = native_tensors(3)
    damage, message = CHANGES[change]
    damage(tensors)
    assert message in refused(layout(tmp_path / "source", tensors), tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"medusa_num_heads": 5}, "medusa_num_heads: 5, but the weights hold 3"),
        ({"medusa_num_heads": "many"}, "must be an integer from 1 to 100000000, got 'many'"),
        ({"medusa_num_layers": True}, "must be an integer from 1 to 100000000, got True"),
        ({"base_model_name_or_path": 7}, "must be a name, got 7"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "source", native_tensors(3), **config)
    assert message in refused(source, tmp_path)


def test_wrong_sizes_in_a_configuration_are_told(tmp_path: Path) -> None:
    source = layouts.fasterdecoding_v2(
        tmp_path / "source", native_tensors(3), medusa_num_layers=2, vocab_size=32000
    )
    notices = " ".join(convert_heads(source, tmp_path / "out").notices)
    assert "medusa_num_layers: 2, the weights hold 1" in notices
    assert "vocab_size: 32000, the weights hold 199" in notices


class Touch:
    """A pickle that runs a command when it is loaded carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "source", native_tensors(2))
    torch.save({"0.0.linear.weight": Touch(tmp_path / "ran")}, source / "medusa_lm_head.pt")
    assert "cannot be read" in refused(source, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_view_larger_than_its_storage(tmp_path: Path) -> None:
    tensors = native_tensors(2)
    tensors["0.1.weight"] = torch.zeros(1).expand(10**6, D)
    source = layouts.fasterdecoding_pt(tmp_path / "source", tensors)
    assert "claims more values than the file holds" in refused(source, tmp_path)


def of_no_values(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def nested(tensor: Tensor) -> Tensor:
    return torch.nested.nested_tensor([tensor, tensor[:1]], layout=torch.strided)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("strange", [of_no_values, nested, Tensor.to_sparse])
def test_a_pickle_of_tensors_that_are_not_plain(
    tmp_path: Path, strange: Callable[[Tensor], Tensor]
) -> None:
    tensors = native_tensors(2)
    name = "0.0.linear.weight"
    tensors[name] = strange(tensors[name])
    source = layouts.fasterdecoding_pt(tmp_path / "source", tensors)
    why = refused(source, tmp_path)
    by_torch = strange is nested and "Weights only load failed" in why  # from torch 2.15 on
    assert f"{name} is no plain tensor" in why or by_torch


def test_a_pipe_in_the_place_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    layouts.write_config(tmp_path / "source", {})
    os.mkfifo(tmp_path / "source" / "other.safetensors")
    assert "holds no weights" in refused(tmp_path / "source", tmp_path)


def test_a_link_beside_a_model_brings_nothing_into_its_copy(tmp_path: Path, target: Path) -> None:
    (tmp_path / "private").write_text("private")
    heads, said = native_tensors(2), {"medusa": {"num_medusa_heads": 2, "num_medusa_layers": 1}}
    source = layouts.whole_model(tmp_path / "source", target, heads, "medusa_heads.", said)
    (source / "tokenizer.json").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match="leads out of the checkpoint folder"):
        convert_heads(source, tmp_path / "out", extract_target=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("keep", [0, 7, 0.5, 0.99])
def test_truncated_files(tmp_path: Path, file: str, keep: float) -> None:
    layout = layouts.fasterdecoding_pt if file.endswith("pt") else layouts.fasterdecoding_v2
    path = layout(tmp_path / "source", native_tensors(2)) / file
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    assert "cannot be read" in refused(tmp_path / "source", tmp_path)


def test_a_pickle_of_other_things(tmp_path: Path) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "source", native_tensors(2))
    torch.save({"state": {"0.0.linear.weight": torch.zeros(D, D)}}, source / "medusa_lm_head.pt")
    assert "other things than tensors" in refused(source, tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "..", ""])
def test_an_index_cannot_lead_out_of_its_folder(file: str, tmp_path: Path) -> None:
    save_file(native_tensors(2), tmp_path / "secret.safetensors")
    layouts.write_config(tmp_path / "source", {})
    index = {"weight_map": {"medusa_head.0.0.linear.weight": file}}
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside its folder" in refused(tmp_path / "source", tmp_path)


def test_an_index_that_promises_too_much(tmp_path: Path, target: Path) -> None:
    source = layouts.whole_model(
        tmp_path / "source", target, native_tensors(2), "medusa_head.", {}, shards=2
    )
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for file, message in (
        ("00001", "which the index promises"),
        ("00009", "which its index names"),
    ):
        for part in ("0.linear.weight", "0.linear.bias", "1.weight"):
            index["weight_map"][f"medusa_head.2.{part}"] = f"model-{file}-of-00002.safetensors"
        path.write_text(json.dumps(index))
        assert message in refused(source, tmp_path)
    index["weight_map"] = ["a list"]
    path.write_text(json.dumps(index))
    assert "which file holds which tensor" in refused(source, tmp_path)


def test_not_heads_at_all(tmp_path: Path, target: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no weights" in refused(tmp_path / "empty", tmp_path)
    assert "found none" in refused(tmp_path / "nowhere", tmp_path)


def test_two_layouts_in_one(tmp_path: Path) -> None:
    tensors = native_tensors(2) | {"hydra_lm_head.0.weight": torch.zeros(V, D)}
    source = layouts.fasterdecoding_v2(tmp_path / "source", tensors)
    assert "say which with --from" in refused(source, tmp_path)


def test_a_native_checkpoint_is_told(tmp_path: Path) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "source", native_tensors(2))
    convert_heads(source, tmp_path / "native")
    assert "of this package already" in refused(tmp_path / "native", tmp_path)


def test_a_folder_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "source", native_tensors(2))
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(ValueError, match="exists and is not empty"):
        convert_heads(source, source)
    assert sorted(path.name for path in source.iterdir()) == before
    (tmp_path / "empty").mkdir()
    assert convert_heads(source, tmp_path / "empty").folder == tmp_path / "empty"
    monkeypatch.setattr(os, "access", lambda place, rights: place != tmp_path)
    with pytest.raises(ValueError, match=r"nothing may be written to '.*': choose another"):
        convert_heads(source, tmp_path / "other")


@pytest.mark.parametrize("size", [{"hidden_size": 32}, {"vocab_size": 200}], ids=str)
def test_a_target_of_other_sizes(
    tmp_path: Path, tiny_llama: TinyLlama, size: dict[str, int]
) -> None:
    tiny_llama(**size).save_pretrained(tmp_path / "target")
    source = layouts.fasterdecoding_pt(tmp_path / "source", native_tensors(2))
    assert "the target's are" in refused(source, tmp_path, target=str(tmp_path / "target"))


def test_targets_that_are_none(tmp_path: Path) -> None:
    source = layouts.fasterdecoding_pt(tmp_path / "source", native_tensors(2))
    assert "found none" in refused(source, tmp_path, target=str(tmp_path / "nowhere"))
    assert "found a file" in refused(source, tmp_path, target=str(source / "medusa_lm_head.pt"))
    assert "expected a causal language model" in refused(
        source, tmp_path, target=str(vllm_only(tmp_path))
    )


def vllm_only(folder: Path) -> Path:
    return layouts.vllm(folder / "vllm", native_tensors(2))


@pytest.mark.parametrize("file", ["config.json", "medusa_lm_head.safetensors"])
def test_a_folder_in_the_place_of_a_file(file: str, tmp_path: Path) -> None:
    source = layouts.fasterdecoding_v2(tmp_path / "heads", native_tensors(2, own=False))
    folder = source if source.is_dir() else source.parent
    (folder / file).unlink(missing_ok=True)
    (folder / file).mkdir()
    assert f"{file}', found a folder: remove it" in refused(folder, tmp_path)
