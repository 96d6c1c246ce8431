"""transformers' own generate(), given a folder, a repository (the hub form) or a decoder."""

from __future__ import annotations

import gc
import re
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import dynamic_module_utils
from transformers.generation.streamers import BaseStreamer

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.inference.models import hub_form
from tests.conftest import TinyLlama

INPUTS: dict[str, Any] = {
    "input_ids": torch.arange(3, 15)[None],
    "attention_mask": torch.ones(1, 12).long(),
}
HUB = {"max_new_tokens": 24, "trust_remote_code": True}


@pytest.fixture(autouse=True)
def module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the files it runs: not into the user's home."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.fixture
def model(tiny_llama: TinyLlama) -> Any:
    return tiny_llama(vocab_size=24)


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> str:
    heads = MedusaHeads.from_target(TargetModel(model), HeadsConfig(num_heads=3))
    return str(save_heads(tmp_path / "heads", heads, TargetModel(model)))


def test_a_folder_names_no_module_that_may_move(folder: str) -> None:
    """Of the package by its own name alone: a folder is read by later versions, too."""
    files = [path for path in Path(folder).rglob("*") if path.suffix in (".json", ".py", ".txt")]
    text = "".join(path.read_text() for path in files)
    assert len(files) == 4 and re.findall(r"medusa_heads\.\w+", text) == []


def seeded(model: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    tokens: torch.Tensor = model.generate(**INPUTS, **options)
    return tokens


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}])
def test_equal_to_plain_generate(model: Any, folder: str, options: Any) -> None:
    expected = seeded(model, max_new_tokens=24, **options)
    for tree in ("chain", "dynamic:5"):
        heads: dict[str, Any] = {"tree": tree, "rng": "transformers"}
        got = seeded(model, **HUB, custom_generate=folder, **heads, **options)
        assert torch.equal(got, expected)
        medusa = hub_form.attached(model, folder, **heads)
        assert medusa.last_stats.tokens == 24
        assert 1 < medusa.last_stats.steps < 40  # the heads were at work


def test_takes_generates_other_arguments(model: Any, folder: str) -> None:
    class Collector(BaseStreamer):
        tokens: list[int] = []  # noqa: RUF012

        def put(self, value: torch.Tensor) -> None:
            self.tokens.extend(value.flatten().tolist())

        def end(self) -> None:
            pass

    streamer = Collector()
    out = model.generate(
        **INPUTS, **HUB, custom_generate=folder, streamer=streamer, return_dict_in_generate=True
    )
    assert streamer.tokens == out.sequences[0].tolist()
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(**INPUTS, **HUB, custom_generate=folder, num_beams=2)
    with pytest.raises(ValueError, match="acceptance must be one of"):
        model.generate(**INPUTS, **HUB, custom_generate=folder, acceptance="typcal")


def test_attached_once_and_let_go_with_the_model(folder: str, tiny_llama: TinyLlama) -> None:
    model = tiny_llama(vocab_size=24)
    medusa = hub_form.attached(model, folder)
    seeded(model, **HUB, custom_generate=folder)
    assert hub_form.attached(model, folder) is medusa
    other = hub_form.attached(model, folder, acceptance="typical")
    assert other is not medusa and other.acceptance == "typical"

    save_heads(folder, MedusaHeads.from_target(TargetModel(model)), TargetModel(model))
    assert hub_form.attached(model, folder).heads.config.num_heads == 4

    gone = weakref.ref(model.to(torch.bfloat16))
    assert hub_form.attached(model, folder).heads.vocab_matrix(0)[0].dtype == torch.bfloat16
    del model, medusa, other
    gc.collect()
    assert gone() is None, "kept alive by what was attached to it"


def test_a_model_that_was_resized_is_attached_anew(folder: str, tiny_llama: TinyLlama) -> None:
    """To heads of another vocabulary it is not, which a sentence says."""
    model: Any = tiny_llama(vocab_size=24)
    seeded(model, **HUB, custom_generate=folder)
    model.resize_token_embeddings(40, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[24:] = 5 * torch.randn(16, model.config.hidden_size)
    with pytest.raises(ValueError, match=r"another target .*'vocab_size': 24.*'vocab_size': 40"):
        seeded(model, **HUB, custom_generate=folder)
    save_heads(folder, MedusaHeads.from_target(TargetModel(model)), TargetModel(model))
    expected = seeded(model, max_new_tokens=24, do_sample=False)
    assert torch.equal(seeded(model, **HUB, custom_generate=folder, do_sample=False), expected)


def test_two_folders_of_one_name(model: Any, folder: str, tmp_path: Path) -> None:
    """transformers copies both to the same place, since their files are the same."""
    target = TargetModel(model)
    second = tmp_path / "other" / "heads"
    save_heads(second, MedusaHeads.from_target(target, HeadsConfig(num_heads=1)), target)
    for place in (folder, str(second)):
        seeded(model, **HUB, custom_generate=place)
    assert hub_form.attached(model, folder).heads.config.num_heads == 3
    assert hub_form.attached(model, second).heads.config.num_heads == 1


def test_a_repository(model: Any, folder: str, tmp_path: Path) -> None:
    """From a hub cache, as a download leaves it; tests have no network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--user--my-heads.v2"
    (repository / "snapshots").mkdir(parents=True)
    Path(folder).rename(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    hub = {**HUB, "custom_generate": "user/my-heads.v2", "cache_dir": str(tmp_path / "hub")}
    expected = seeded(model, max_new_tokens=24)
    assert torch.equal(seeded(model, **hub), expected)
    assert torch.equal(seeded(model, **hub, revision=commit), expected)
    with pytest.raises(
        ValueError, match="expected a heads checkpoint at 'user/none': there is no such folder"
    ):
        seeded(model, **hub, heads="user/none")


def test_mistakes_are_one_sentence(model: Any, folder: str, tiny_llama: TinyLlama) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        model.generate(**INPUTS, custom_generate=folder)
    other = tiny_llama(vocab_size=24, seed=1)
    with pytest.raises(ValueError, match="these heads were trained for another target"):
        other.generate(**INPUTS, **HUB, custom_generate=folder)
    (Path(folder) / "medusa_heads.json").unlink()
    with pytest.raises(ValueError, match="expected a heads checkpoint"):
        model.generate(**INPUTS, **HUB, custom_generate=folder)
    with pytest.raises(ValueError, match="name the heads with heads="):
        hub_form.custom_generate(model, **INPUTS)


@pytest.mark.parametrize("tree", ["auto", "dynamic:7+suffix"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_policy_that_learns_between_its_texts(
    tiny_llama: TinyLlama, tree: str, lora: bool
) -> None:
    """As in reinforcement learning: what was drawn teaches the target, in place, and so on."""
    policy: Any = tiny_llama(vocab_size=24)
    heads = MedusaHeads.from_target(policy, HeadsConfig(num_heads=3))
    if lora:
        config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        inner, policy = policy, peft.get_peft_model(policy, config)
    decoder = MedusaModel(inner if lora else policy, heads, tree=tree)
    undrafted = MedusaModel(inner if lora else policy, heads, tree="none")
    own = policy.train().generate
    policy.generate = partial(own, custom_generate=decoder.decode)
    learns = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer, texts = torch.optim.AdamW(learns, lr=0.1 if lora else 3e-3), []
    for _ in range(3):
        greedy = seeded(policy, max_new_tokens=24, do_sample=False)
        assert torch.equal(greedy, own(**INPUTS, max_new_tokens=24, do_sample=False))
        drawn = seeded(policy, max_new_tokens=24, do_sample=True)
        assert torch.equal(drawn, seeded(undrafted, max_new_tokens=24, do_sample=True))
        assert policy.training and not drawn.is_inference()
        texts.append(drawn)
        policy(drawn, labels=drawn).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(texts[0], texts[1]) and not torch.equal(texts[1], texts[2])


def test_adapters_by_row_are_refused_and_leave_the_model_usable(model: Any) -> None:
    """Rows leave a batch as they end, of which peft's hooks know nothing."""
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    decoder = MedusaModel(model, MedusaHeads.from_target(model, HeadsConfig(num_heads=2)))
    names, own = ["default", "__base__"], adapted.generate
    two: dict[str, Any] = {name: value.repeat(2, 1) for name, value in INPUTS.items()}
    expected = own(**two, max_new_tokens=9, do_sample=False)
    with pytest.raises(ValueError, match="does not support adapter_names for a batch"):
        own(**two, adapter_names=names, custom_generate=decoder.decode, max_new_tokens=9)
    assert torch.equal(own(**two, max_new_tokens=9, do_sample=False), expected)
    given = {"adapter_names": names[:1], "max_new_tokens": 9, "do_sample": False}
    got = own(**INPUTS, **given, custom_generate=decoder.decode)
    assert torch.equal(got, own(**INPUTS, **given))


@pytest.mark.parametrize("compile", [False, True, "steps"])
def test_another_lm_head_and_autocast(model: Any, compile: Any) -> None:
    """Followed, but refused where graphs were made without."""
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=2))
    decoder = MedusaModel(model, heads, tree=4, compile=compile, compile_backend="eager")
    asked: dict[str, Any] = {**INPUTS, "max_new_tokens": 9, "do_sample": False}

    def check(message: str) -> None:
        if compile:
            with pytest.raises(ValueError, match=message):
                decoder.generate(**asked)
        else:
            got = torch.as_tensor(decoder.generate(**asked))
            assert torch.equal(got, model.generate(**asked))

    with torch.autocast("cpu", torch.bfloat16):
        check("a compiled target of torch.float32 is not decoded within torch.autocast: leave comp")
    assert torch.equal(torch.as_tensor(decoder.generate(**asked)), model.generate(**asked))
    anew = torch.nn.Linear(model.config.hidden_size, 24, bias=False)
    model.set_output_embeddings(anew)
    check("the lm_head of the target is another module by now, .* make the decoder anew")
