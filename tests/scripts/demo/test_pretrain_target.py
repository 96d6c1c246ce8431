"""The recipe of the demo's target, on a few files: it trains, resumes exactly, and loads."""

import importlib.util
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[3] / "scripts" / "demo" / "pretrain_target.py"
TINY = shlex.split("""
--max_files 12 --packages rich --vocab_size 400 --hidden_size 128 --num_layers 1
--sequence_length 32 --eval_sequences 4 --max_steps 4 --save_steps 2 --eval_steps 2
--logging_steps 1 --per_device_train_batch_size 2 --warmup_steps 1 --disable_tqdm True
""")


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_demo_target", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrain") / "out"
    recipe.main([*TINY, "--output_dir", str(folder)])
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype="auto").state_dict()


def test_writes_a_model_and_tokenizer_that_load(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "target", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(trained / "target")
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == 400
    text = "def f(x):\n    return x + 10\n"
    inputs = tokenizer(text, return_tensors="pt")
    assert tokenizer.decode(inputs["input_ids"][0]) == text
    assert model(**inputs).logits.isfinite().all()


def test_resumed_training_ends_at_the_same_weights(
    recipe: ModuleType, trained: Path, tmp_path: Path
) -> None:
    interrupted = tmp_path / "out"  # as a kill after step 3 leaves it
    shutil.copytree(trained, interrupted)
    shutil.rmtree(interrupted / "checkpoint-4")
    shutil.rmtree(interrupted / "target")
    recipe.main([*TINY, "--output_dir", str(interrupted), "--resume"])
    expected, resumed = weights(trained), weights(interrupted)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


@pytest.mark.slow
def test_measures_a_finished_model(
    recipe: ModuleType, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.main([*TINY, "--output_dir", str(tmp_path), "--evaluate", str(trained / "target")])
    loss = float(capsys.readouterr().out.split("Held-out loss: ")[1].split()[0])
    assert 4 < loss < 8  # next to untrained: log(400) = 5.99
    assert list(tmp_path.iterdir()) == []


def test_refuses_to_train_over_a_started_training(recipe: ModuleType, trained: Path) -> None:
    with pytest.raises(ValueError, match="already holds a training: add --resume"):
        recipe.main([*TINY, "--output_dir", str(trained)])


def test_names_a_package_that_is_not_installed(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Package 'no_such_package' is not installed"):
        recipe.main(["--packages", "no_such_package", "--output_dir", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--evaluate", "nowhere"], "--evaluate wants the folder of a model"),
        (["--evaluate", str(SCRIPT.parent)], "--evaluate wants the folder of a model"),
        (["--sequence_length", "0"], "sequence_length must be at least 1, got 0"),
        (["--model_type", "gpt"], "invalid choice: 'gpt'"),
        (["--no_such_flag", "3"], "--no_such_flag"),
        (["--sequence_len", "32"], "--sequence_len"),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence(
    recipe: ModuleType, flags: list[str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as told:
        recipe.main([*flags, "--output_dir", str(tmp_path / "out")])
    assert sentence in str(told.value) and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_hybrid_has_recurrent_layers(recipe: ModuleType, tmp_path: Path) -> None:
    hybrid = ["--model_type", "qwen3_5_text", "--num_layers", "3"]
    recipe.main([*TINY, *hybrid, "--output_dir", str(tmp_path)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="auto")
    assert model.config.layer_types == ["linear_attention", "linear_attention", "full_attention"]


def test_a_hybrid_has_as_many_parameters(recipe: ModuleType, trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained / "target")
    sizes = []
    for kind in ("llama", "qwen3_5_text"):
        config = recipe.target_config(recipe.TargetArguments(model_type=kind), tokenizer)
        with torch.device("meta"):
            sizes.append(AutoModelForCausalLM.from_config(config).num_parameters())
    assert "linear_attention" in config.layer_types
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
