"""Models and tokenizers by name, where the hub is away or a configuration is damaged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification, LlamaModel

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.checkpoint.adapter import adapter_digest
from medusa_heads.checkpoint.checkpoint import describe_target, save_heads
from medusa_heads.errors import NoModel
from medusa_heads.inference.regeneration.arguments import RegenerateArguments
from medusa_heads.target.loading import load_causal_lm, load_tokenizer, stored_form
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.meta_target import meta_target
from tests.conftest import TinyLlama
from tests.hub.hub_server import LocalHub, log_in
from tests.inference.speaking import make_tokenizer

LOADS: tuple[Callable[[], object], ...] = (
    lambda: load_causal_lm("nobody/nothing", dtype="auto", trust_remote_code=False),
    lambda: load_tokenizer("nobody/nothing"),
    lambda: meta_target(TargetArguments("nobody/nothing")),
)
AWAY = """
from tests.target.test_loading import said_and_seconds
sentences, seconds = said_and_seconds()
print(*sentences, seconds, sep="\\n")
"""


def said_and_seconds() -> tuple[list[str], float]:
    """What is said of a name by all that load by names, and how long they took."""
    said, begun = [], time.perf_counter()
    for load in LOADS:
        try:
            load()
        except (OSError, ValueError) as error:
            said.append(" ".join(str(error).split()))
    return said, time.perf_counter() - begun


def check_said_soon(sentences: list[str], seconds: float, url: str) -> None:
    assert len(sentences) == 3
    assert all(f"couldn't connect to '{url}'" in each for each in sentences)
    assert "expected a causal language model" in sentences[0]
    assert seconds < 15


def test_a_hub_that_does_not_answer_is_told_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with LocalHub({}) as gone:
        pass  # nothing listens there any more; a hub's client would try it five times for each file
    log_in(gone, "hf_nobodynobodynobody", tmp_path, monkeypatch)
    check_said_soon(*said_and_seconds(), gone.url)
    assert not any(capfd.readouterr())


@pytest.mark.slow
def test_a_process_whose_hub_does_not_answer_says_so_soon() -> None:
    """As above, by what its environment says."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", AWAY], capture_output=True, text=True, env=environment, check=True
    )
    *sentences, seconds = done.stdout.splitlines()
    check_said_soon(sentences, float(seconds), "http://127.0.0.1:9")
    assert done.stderr == ""


def test_a_configuration_that_contradicts_itself_is_one_sentence(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 7}))
    with pytest.raises(ValueError, match=r"expected a causal .*not a multiple of the number") as e:
        load_causal_lm(str(tmp_path), dtype="auto", trust_remote_code=False)
    assert len(str(e.value).splitlines()) == 1
    with pytest.raises(ValueError, match="not a multiple of the number"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_configuration_of_quantised_weights_is_one_sentence(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    bits = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": "6"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": bits}))
    with pytest.raises(NoModel, match=r"expected a causal .*llm_int8_threshold must be a float"):
        load_causal_lm(str(tmp_path), dtype="auto", trust_remote_code=False)


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ({"": "cpu", "model.layers.99": "cpu"}, "names 'model.layers.99', and the model has no su"),
        ({"": "cpu", "lm_haed": "disk"}, "no such part: did you mean 'lm_head'?"),
        ({"": "cpu", "lm_head": "cuda:99"}, "'cuda:99'"),
        ({"": "gpu"}, "'gpu'"),
    ],
    ids=["layer", "misspelt", "device", "word"],
)
def test_a_device_map_names_what_is_there(
    device_map: dict[str, str],
    said: str,
    tiny_llama: TinyLlama,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # found out before weights are read
    with pytest.raises(ValueError, match=re.escape(said)):
        TargetModel.from_pretrained(str(tmp_path), device_map=device_map)


def test_a_device_map_may_name_modules_and_weights(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    parts = {"model": "cpu", "model.layers.1": "cpu", "lm_head.weight": "cpu"}
    target = TargetModel.from_pretrained(str(tmp_path), device_map=parts)
    assert target.device.type == "cpu"
    (buffer, _), *_ = target.model.named_buffers()
    TargetModel.from_pretrained(str(tmp_path), device_map={"": "cpu", buffer: "cpu"})


def test_a_device_map_may_lay_out_the_target_of_an_adapter(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    """Whose folder has no configuration of a model."""
    loaded = TargetModel.from_pretrained(save_adapter(tiny_llama, tmp_path), device_map={"": "cpu"})
    assert any("lora" in name for name, _ in loaded.model.named_parameters())


def test_no_weight_is_made_up(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """transformers gives models without an lm_head a random one, and says so in its log alone."""
    LlamaModel(tiny_llama().config).save_pretrained(tmp_path)
    with pytest.raises(NoModel, match=r"'lm_head.weight' of a LlamaForCausalLM in its files: name"):
        TargetModel.from_pretrained(str(tmp_path))


def test_a_model_that_judges_texts_is_none_that_writes_them(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    """As a reward model. Of one with tied embeddings no weight of a causal LM is missing."""
    config = tiny_llama().config
    config.tie_word_embeddings = True
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    for load in (
        lambda: TargetModel.from_pretrained(str(tmp_path)),
        lambda: meta_target(TargetArguments(str(tmp_path))),
    ):
        with pytest.raises(NoModel, match=r"found a LlamaForSequenceClassification, .* 'archit"):
            load()


def test_weights_of_other_sizes_are_told_with_what_to_do(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    """transformers says it in its log, and of an adapter with tokens of its own alike."""
    peft = pytest.importorskip("peft")
    target = tiny_llama()
    target.save_pretrained(tmp_path / "target")
    target.name_or_path = str(tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    target.resize_token_embeddings(config["vocab_size"] + 3, mean_resizing=False)
    learnt = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    peft.get_peft_model(target, peft.LoraConfig(task_type="CAUSAL_LM", **learnt)).save_pretrained(
        tmp_path / "lora"
    )
    with pytest.raises(NoModel, match="as where tokens were added to it: merge it into its model"):
        TargetModel.from_pretrained(str(tmp_path / "lora"))
    more = config | {"vocab_size": config["vocab_size"] + 3}
    (tmp_path / "target/config.json").write_text(json.dumps(more))
    with pytest.raises(NoModel, match=r"other sizes than its config.json says: save or download"):
        TargetModel.from_pretrained(str(tmp_path / "target"))


def save_adapter(tiny_llama: TinyLlama, folder: Path, **more: Any) -> str:
    """The folder of an adapter that is no zero, beside that of its target."""
    peft = pytest.importorskip("peft")
    tiny_llama().save_pretrained(folder / "target")
    target = TargetModel.from_pretrained(str(folder / "target"))
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(**settings, **more)
    peft.get_peft_model(target.model, config).save_pretrained(folder / "lora")
    return str(folder / "lora")


def test_heads_on_an_adapter_are_loaded_on_it_again(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """transformers knows such a target by the name of the model that the adapter was put into, with
    which heads wrote that model's text."""
    adapter = save_adapter(tiny_llama, tmp_path)
    target = TargetModel.from_pretrained(adapter)
    assert target.name_or_path == adapter
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=1))
    save_heads(tmp_path / "heads", heads, target)
    loaded = MedusaModel.from_pretrained(tmp_path / "heads", tree="none")
    assert adapter_digest(loaded.target.model) == adapter_digest(target.model) is not None
    assert loaded.save_pretrained(tmp_path / "saved").exists()
    with pytest.raises(NoModel, match="found a LoRA adapter: merge it into its target"):
        meta_target(TargetArguments(adapter))


def test_an_adapter_in_memory_gives_its_target_no_name(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    adapter = save_adapter(tiny_llama, tmp_path)
    target = TargetModel.from_pretrained(str(tmp_path / "target"))
    assert describe_target(target)["name_or_path"] == str(tmp_path / "target")
    adapted = import_module("peft").PeftModel.from_pretrained(target.model, adapter)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=1))
    save_heads(tmp_path / "heads", heads, TargetModel(adapted))
    with pytest.raises(ValueError, match="does not name its target: pass target="):
        MedusaModel.from_pretrained(tmp_path / "heads", tree="none")


def test_an_adapter_of_any_kind_gives_its_target_no_name(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    tiny_llama().save_pretrained(tmp_path)
    only = {"feedforward_modules": [], "init_ia3_weights": False}
    for config in (
        peft.IA3Config(target_modules=["v_proj"], **only),
        peft.LoHaConfig(target_modules=["v_proj"], init_weights=False),
    ):
        base = TargetModel.from_pretrained(str(tmp_path)).model
        adapted = peft.get_peft_model(base, config)
        assert describe_target(TargetModel(adapted))["name_or_path"] == ""
        with adapted.disable_adapter():
            assert describe_target(TargetModel(adapted))["name_or_path"] == str(tmp_path)


def test_an_adapter_that_is_not_read_whole_is_refused(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    """transformers 5.24 leaves DoRA's magnitudes as they were before training."""
    adapter = save_adapter(tiny_llama, tmp_path, use_dora=True)
    with pytest.raises(NoModel, match=r"lora_magnitude_vector.* in its files: merge the adapter"):
        TargetModel.from_pretrained(adapter)


def test_an_adapters_tokenizer_is_its_own_or_its_targets(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    adapter, tokenizer = save_adapter(tiny_llama, tmp_path), make_tokenizer()
    with pytest.raises(ValueError, match="tokenizer"):
        load_tokenizer(adapter)
    tokenizer.save_pretrained(tmp_path / "target")
    assert len(load_tokenizer(adapter)) == len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(adapter)
    assert len(load_tokenizer(adapter)) == len(tokenizer)


@pytest.mark.filterwarnings("ignore")  # it is deprecated, and still what CPUs are told of
def test_an_lm_head_that_keeps_no_matrix_is_refused(tiny_llama: TinyLlama) -> None:
    kinds = {torch.nn.Linear}
    quantised = torch.ao.quantization.quantize_dynamic(tiny_llama(), kinds, dtype=torch.qint8)
    with pytest.raises(ValueError, match="has no lm_head that is a matrix"):
        TargetModel(quantised)


def test_a_file_in_a_models_place_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name looks like; transformers takes it for a configuration that is damaged."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in ("model.gguf", "./model.gguf", str(tmp_path / "model.gguf")):
        with pytest.raises(NoModel, match="found a file: name the folder of a model"):
            load_causal_lm(name, dtype="auto", trust_remote_code=False)


def test_a_target_in_the_users_home(
    tmp_path: Path, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As YAML files name it, in which no shell writes the home out."""
    tiny_llama().save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    monkeypatch.setenv("HOME", str(tmp_path))
    load_tokenizer("~/target")
    form = stored_form("~/target")
    assert form is not None and form.dtype == torch.float32
    train, regenerate = TargetArguments("~/target"), RegenerateArguments("~/target", "out", ["a"])
    assert train.model_name_or_path == regenerate.model_name_or_path == str(tmp_path / "target")
    assert TargetArguments("user/target").model_name_or_path == "user/target"
