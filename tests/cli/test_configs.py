"""Every configuration that is shipped runs up to its first step, on its own architecture."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from medusa_heads.cli import train_draft, train_heads
from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.inference.regeneration.arguments import RegenerateArguments

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
# The numbers of the models on the hub.
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        dtype="bfloat16",
    ),
    "qwen2.5-7b": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=32768,
        dtype="bfloat16",
    ),
    "mistral-7b-qlora": MistralConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32768,
        max_position_embeddings=32768,
        sliding_window=None,
        dtype="bfloat16",
    ),
}
SAYS = {
    "llama-3.1-8b": ["8.03 B parameters", "67.1 M parameters", "16.1 GB"],
    "qwen2.5-7b": ["7.62 B parameters", "51.4 M parameters", "15.2 GB"],
    "mistral-7b-qlora": ["7.25 B parameters", "4 bits", "4.1 GB", "adapter, gradients, AdamW"],
    "hydra": ["5 hydra heads", "11 M parameters", "384 of 16 rows"],
    "medusa-2": ["adapter, gradients, AdamW"],
    "demo": ["medusa heads", "11 M parameters"],
    "draft-demo": ["LlamaForCausalLM of 2 layers: 4.72 M parameters", "384 of 16 rows"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `medusa-heads regenerate` writes, in small."""
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path_factory.mktemp("answers")
    rows = []
    for _ in range(600):
        ids = torch.randint(1, 30000, (40,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * 10 + ids[10:]})
    Dataset.from_list(rows).save_to_disk(folder)
    return folder


# Others draw their text as these do, and learn as these do; the demo's own tests run its plan, and
# those of train-draft another one.
ALIKE = ("demo", "draft-demo", "hydra", "medusa-2")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=pytest.mark.slow if p.stem in ALIKE else (), id=p.stem)
        for p in CONFIGS
    ],
)
def test_a_shipped_config_is_planned_on_one_screen(
    path: Path,
    answers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    flags = ["--config", str(path), "--dry_run", "--measure_steps", "false"]
    flags += ["--output_dir", str(tmp_path / "run")]
    if path.stem in ARCHITECTURES:
        target = tmp_path / "target"
        ARCHITECTURES[path.stem].save_pretrained(target)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "assets/demo-target" / name, target)
        flags += ["--model_name_or_path", str(target), "--dataset", str(answers)]
    command = train_draft if path.stem.startswith("draft") else train_heads
    assert command.main(flags) == 0
    shown = capsys.readouterr().out
    assert "Dry run: nothing is trained" in shown and "memory of a process" in shown
    assert len(shown.splitlines()) < 60
    words = " ".join(shown.replace("│", " ").split())
    for expected in SAYS.get(path.stem, []):
        assert expected in words, expected
    assert not (tmp_path / "run").exists()


def test_a_target_without_configuration_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model_name_or_path", str(tmp_path), "--dataset", "stdlib", "--dry_run"]
    assert train_heads.main(given) == 2
    assert "expected the configuration of a causal language model" in capsys.readouterr().err


def test_the_text_that_configurations_learn_from_is_written_as_their_comments_say() -> None:
    # What is parsed is not run: the models and corpora are large.
    given: list[RegenerateArguments] = []
    for config in CONFIGS:
        comments = re.sub(r"\\\n# +", "", config.read_text())
        for command in re.findall(r"^# +medusa-heads regenerate (.+)", comments, re.M):
            argv = shlex.split(command)
            given += parse_arguments(
                (RegenerateArguments,),
                argv,
                prog="x",
                description="",
                positional=("model_name_or_path",),
            )
            assert f"model_name_or_path: {given[-1].model_name_or_path}\n" in comments
            assert f"dataset: {given[-1].output_dir}\n" in comments
    assert len(given) >= 3
