"""Where a draft model begins, and what is written of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch.nn.modules.module import _IncompatibleKeys
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from medusa_heads.checkpoint.draft_checkpoint import load_draft, read_draft_sidecar, save_draft
from medusa_heads.target.recurrent import is_recurrent
from medusa_heads.target.target import TargetModel
from medusa_heads.training.runs.pruned_target import begin_draft, draft_shape, spread
from scripts.prove.seeing.models import build
from scripts.prove.tiny_configs import tiny_config
from tests.killed import dies
from tests.training.runs.test_draft_trainer import trainer_of


def test_layers_are_taken_evenly() -> None:
    assert spread(6, 2) == [0, 5]
    assert spread(6, 3) == [0, 2, 5]
    assert spread(32, 1) == [0]
    assert spread(4, 4) == [0, 1, 2, 3]


def test_all_layers_make_the_target_itself(target: TargetModel) -> None:
    draft = begin_draft(target, num_layers=2)
    ids_1T = torch.arange(9)[None]
    torch.testing.assert_close(draft(ids_1T).logits, target.model(ids_1T).logits)
    assert all(parameter.requires_grad for parameter in draft.parameters())
    own = {tensor.data_ptr() for tensor in draft.state_dict().values()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in target.model.state_dict().values())


def test_a_pruned_draft_is_the_target_without_its_other_layers() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=16, n_layer=4, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    draft = begin_draft(TargetModel(model), num_layers=2).eval()
    assert draft.config.n_layer == 2
    ids_1T = torch.arange(9)[None]
    got = draft(ids_1T).logits
    model.transformer.h = torch.nn.ModuleList([model.transformer.h[0], model.transformer.h[3]])
    torch.testing.assert_close(got, model(ids_1T, use_cache=False).logits)


@pytest.mark.parametrize("kind", ["gemma3", "smolvlm"])
def test_layers_of_a_target_that_reads_images_draft_its_text(kind: str) -> None:
    """As many layers look at images."""
    target, ids_1T = TargetModel(build(kind)), torch.arange(5, 14)[None]
    draft = begin_draft(target, num_layers=2).eval()
    torch.testing.assert_close(draft(ids_1T).logits, target.model(ids_1T).logits)


def test_every_list_with_an_entry_a_layer_is_cut() -> None:
    """Also where the number of layers is the length of one of them."""
    config = tiny_config("nemotron_h")
    config.every_layer = tuple(range(4))
    config.layers_block_type = ["full_attention", "mlp"]
    if is_recurrent(config):
        pytest.skip("this transformers keeps states of layers that have none")
    config.layers_block_type = ["full_attention", "moe", "linear_attention", "mlp"]
    target = TargetModel(AutoModelForCausalLM.from_config(config))
    draft = draft_shape(target, num_layers=2).config
    assert draft.layers_block_type == [config.layers_block_type[i] for i in (0, 3)]
    assert draft.every_layer == [0, 3]
    assert draft.mtp_layers_block_type == config.mtp_layers_block_type  # layers of another kind


@pytest.mark.parametrize(
    ("kind", "hidden_size"),
    [
        ("gemma4_text", 32),  # heads of two widths
        ("inkling2_text", None),  # whose logits must be capped
        ("prophetnet", None),  # counts layers otherwise
    ],
)
def test_a_kind_that_has_no_smaller_form_is_refused(kind: str, hidden_size: int | None) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    target = TargetModel(AutoModelForCausalLM.from_config(tiny_config(kind)))
    with pytest.raises(ValueError, match=f"no smaller {kind} can be made .*: give a draft_model"):
        begin_draft(target, num_layers=2, hidden_size=hidden_size)


def gemma4(**settings: Any) -> TargetModel:
    """Four layers; those that see all of the text have wider attention heads."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no gemma4_text")
    config = tiny_config("gemma4_text").to_dict()
    for name in ("layer_types", "num_hidden_layers", "per_layer_config"):
        config.pop(name, None)
    kinds = ["sliding_attention", "full_attention"] * 2
    config |= {"num_hidden_layers": 4, "layer_types": kinds, "global_head_dim": 32}
    config |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0} | settings
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma4_text"].from_dict(config))
    return TargetModel(made.eval())


def test_layers_keep_what_they_alone_have(tmp_path: Path) -> None:
    target, ids_1T = gemma4(), torch.arange(9)[None]
    draft = begin_draft(target, num_layers=3).eval()  # the second of them had another number
    widths = [draft.get_submodule(f"model.layers.{i}.self_attn.q_norm").weight for i in range(3)]
    model: Any = target.model
    taken = [model.model.layers[i] for i in (0, 2, 3)]
    assert all(map(torch.equal, widths, [layer.self_attn.q_norm.weight for layer in taken]))
    draft.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(ids_1T).logits, draft(ids_1T).logits)


@pytest.mark.parametrize(
    ("settings", "layers", "sentence"),
    [
        ({}, 1, r"with the layers \[0\] alone its layer_types would be read otherwise"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}, 2, "do not fit"),
    ],
)
def test_layers_that_cannot_stand_alone_are_refused(
    settings: dict[str, Any], layers: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        begin_draft(gemma4(**settings), num_layers=layers)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_shape_is_refused_as_the_draft_would_be(device: str) -> None:
    with torch.device(device):
        config = tiny_config("qwen3_moe")
        config.num_hidden_layers, config.mlp_only_layers = 4, [1]  # no list with an entry a layer
        target = TargetModel(AutoModelForCausalLM.from_config(config))
    for begin in (begin_draft, draft_shape)[device == "meta" :]:
        with pytest.raises(ValueError, match=r"has no weights 'model\.layers\.3\.mlp\..* needs"):
            begin(target, num_layers=2)
    shape = draft_shape(target, num_layers=4)
    assert shape.num_parameters() == target.model.num_parameters() and shape.device.type == "meta"
    with pytest.raises(ValueError, match="layers of a quantised target cannot be trained"):
        draft_shape(target, num_layers=4, quantised=True)
    assert draft_shape(target, hidden_size=config.hidden_size, quantised=True).device.type == "meta"


def test_a_fresh_draft_has_the_width_asked_for(target: TargetModel) -> None:
    draft = begin_draft(target, num_layers=1, hidden_size=8)
    assert draft.config.hidden_size == 8 and draft.config.num_attention_heads == 1
    assert draft.config.intermediate_size == 16 and draft.config.vocab_size == 61
    assert draft(torch.arange(5)[None]).logits.shape == (1, 5, 61)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_layers": 3}, "the target has 2 layers, 3 of them"),
        ({"hidden_size": 12}, "must be a multiple of that, got 12"),
        ({"draft_model": "./nowhere"}, "expected a causal language model"),
    ],
)
def test_what_cannot_be_is_refused(
    target: TargetModel, settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        begin_draft(target, **settings)  # type: ignore[arg-type]


def test_a_saved_draft_is_an_ordinary_model_that_names_its_target(
    target: TargetModel, tmp_path: Path
) -> None:
    draft = begin_draft(target, num_layers=1)
    save_draft(tmp_path / "draft", draft, target, measured={"acceptance": 0.5})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    for name, tensor in draft.state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor)
    sidecar = read_draft_sidecar(tmp_path / "draft")
    assert sidecar["target"]["lm_head_sha256"] == target.fingerprint()["lm_head_sha256"]
    assert sidecar["measured"] == {"acceptance": 0.5}
    assert not list((tmp_path / "draft").glob(".*"))
    again = load_draft(tmp_path / "draft", target)
    assert again.model.num_parameters() == draft.num_parameters()


def test_a_draft_model_that_is_killed_over_another_vouches_for_neither(
    target: TargetModel, tmp_path: Path
) -> None:
    save_draft(tmp_path, begin_draft(target, num_layers=1), target)
    other = begin_draft(target, num_layers=2)
    assert dies(lambda: save_draft(tmp_path, other, target), renames=1)
    assert not (tmp_path / "draft_model.json").exists()
    save_draft(tmp_path, other, target)
    assert read_draft_sidecar(tmp_path) and not list(tmp_path.glob(".*"))


def test_saving_in_the_targets_dtype_rounds_a_copy(target: TargetModel, tmp_path: Path) -> None:
    draft = begin_draft(target, num_layers=1)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    target.model.to(torch.bfloat16)  # type: ignore[arg-type]
    save_draft(tmp_path, draft, target)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())


def test_another_vocabulary_is_refused(target: TargetModel, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a vocabulary of 50 tokens, the target one of 61"):
        begin_draft(target, draft_model=str(tmp_path))


def test_what_dropout_adds_to_a_loss_is_no_harm_that_training_did(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    """What a run compares with its beginning is measured without it, in the middle of training."""
    trainer = trainer_of(target, make_rows(4), tmp_path)
    draft: Any = trainer.draft.model.eval()
    draft.model.layers[0].self_attn.attention_dropout = 0.9
    beginning = trainer._losses_of_known_text()
    draft.train()
    draft.lm_head.eval()
    modes = [module.training for module in draft.modules()]
    assert torch.equal(trainer._losses_of_known_text(), beginning)
    assert [module.training for module in draft.modules()] == modes


def test_tied_weights_are_not_said_to_be_missing(
    make_rows: Callable[..., Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    trainer = trainer_of(TargetModel(GPT2LMHeadModel(config)), make_rows(4), tmp_path)
    said: list[str] = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", said.append)
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None and not said
    trainer._issue_warnings_after_load(_IncompatibleKeys(["transformer.ln_f.bias"], []))
    assert said == [
        "There were missing keys in the checkpoint model loaded: ['transformer.ln_f.bias']."
    ]
