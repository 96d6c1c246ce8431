"""The command train-draft: a whole run on a tiny target, mistakes, and what can be done with it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.cli.train_draft import ARGUMENTS, main
from medusa_heads.cli.verbs.generate import main as generate
from tests.conftest import Refused

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("draft-*.yaml"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w") as file:
        for d in range(30):
            lines = (
                "".join(chr(40 + (d + line * 3 + i) % 80) for i in range(9)) for line in range(6)
            )
            file.write(json.dumps({"text": "\n".join(lines)}) + "\n")
    return path


def flags(speaker: Path, corpus: Path, output: Path, *more: str) -> list[str]:
    given = ["--model_name_or_path", str(speaker / "target"), "--dataset", str(corpus)]
    given += ["--output_dir", str(output), "--max_length", "32", "--max_steps", "2"]
    given += ["--training_args", '{"use_cpu": true, "disable_tqdm": true}']
    return [*given, *more]


@pytest.fixture(scope="module")
def draft(speaker: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("draft") / "run"
    more = ["--draft_layers", "1", "--on_policy_share", "0.5"]
    assert main(flags(speaker, corpus, output, *more)) == 0
    return output


def test_a_run_leaves_an_ordinary_model_and_its_story(draft: Path, speaker: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(draft)
    assert model.config.num_hidden_layers == 1
    tokenizer = AutoTokenizer.from_pretrained(draft)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(speaker / "target").get_vocab()
    story = yaml.safe_load((draft / "run.yaml").read_text())
    assert story["draft"]["on_policy_share"] == 0.5 and story["training_set"]["rows"] > 0
    measured = json.loads((draft / "draft_model.json").read_text())["measured"]
    assert 0 < measured["acceptance"] < 1 and measured["tokens_per_step_8"] >= 1


def test_what_was_trained_drafts_for_its_target(
    draft: Path, speaker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "def f(", "--max-new-tokens", "24", "--stats"]
    assert generate([str(speaker / "heads"), "--tree", "none", *options]) == 0
    plain = capsys.readouterr().out
    assert generate([str(draft), *options]) == 0
    printed = capsys.readouterr()
    assert printed.out == plain and "tokens per step" in printed.err
    named = [str(speaker / "target"), "--draft_model", str(draft), "--tree", "dynamic:6"]
    assert generate([*named, *options]) == 0
    assert capsys.readouterr().out == plain


def test_a_dry_run_says_what_would_be_trained(
    speaker: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unmeasured = ["--measure_steps", "false"]
    shapes = {
        "1 layers": [],
        "2 layers": ["--draft_layers", "2", "--draft_hidden_size", "16", *unmeasured],
        "2 layers: ": ["--draft_model", str(speaker / "target"), *unmeasured],
    }
    for shape, more in shapes.items():
        assert main(flags(speaker, corpus, tmp_path / "run", "--dry_run", *more)) == 0
        shown = capsys.readouterr().out
        assert f"LlamaForCausalLM of {shape}" in shown
        assert "2 of 16 rows" in shown and "are learnt (green)" in shown
    assert not (tmp_path / "run").exists()


def test_a_dry_run_fetches_no_weights_of_a_given_draft_model(
    speaker: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model of the hub, its configuration and its tokenizer are here."""
    folder = Path(os.environ["HF_HOME"], "hub", "models--some--draft")
    shutil.copytree(
        speaker / "target",
        folder / "snapshots" / ("0" * 40),
        ignore=shutil.ignore_patterns("*.safetensors"),
    )
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    more = ["--dry_run", "--draft_model", "some/draft"]
    assert main(flags(speaker, corpus, tmp_path / "run", *more)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "No step was measured: the weights of 'some/draft' are not on this disk." in said


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--draft_model", "./nowhere"], "of a causal language model"),
        (["--draft_layers", "9"], "the target has 2 layers, 9 of them"),
        (["--draft_layer", "1"], "did you mean '--draft_layers'?"),
        (["--divergence", "sideways"], "invalid choice: 'sideways'"),
        (["--save_steps", "2", "--eval_steps", "3"], "multiple"),
        (["--shard_target"], "taught by a whole target in each process: leave shard_target out"),
        (["nowhere.jsonl"], "expected a corpus at 'nowhere.jsonl', found none"),
        (["--resume_from_checkpoint", "last", "--self_distill"], "nothing to resume"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    more: list[str],
    sentence: str,
    speaker: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = corpus if more[0].startswith("-") else Path(more.pop())
    assert main(flags(speaker, text, tmp_path / "run", *more)) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("train-draft: error: ") and sentence in message
    assert not (tmp_path / "run" / "draft_model.json").exists()


def test_a_draft_model_that_cannot_be_is_refused_before_the_target_writes_text(
    speaker: Path,
    checkpoint: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mistakes = {
        "the target has 2 layers, 9 of them": ["--draft_layers", "9"],
        "has another vocabulary": ["--draft_model", str(checkpoint / "target")],
        "found heads, which only draft on their target": ["--draft_model", str(speaker / "heads")],
    }
    for sentence, wrong in mistakes.items():
        for more in (["--self_distill"], ["--dry_run"]):
            assert main(flags(speaker, corpus, tmp_path / "run", *wrong, *more)) == 2
            assert sentence in capsys.readouterr().err.splitlines()[-1]
            assert not (tmp_path / "run").exists()


def test_the_target_is_never_written_over(speaker: Path, corpus: Path, refused: Refused) -> None:
    before = {path.name: path.read_bytes() for path in (speaker / "target").iterdir()}
    said = refused(main, flags(speaker, corpus, speaker / "target"))
    assert "where this run would write over it: choose another output_dir" in said
    assert {path.name: path.read_bytes() for path in (speaker / "target").iterdir()} == before


def test_the_module_can_be_launched(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "medusa_heads.cli.train_draft", "--model_name_or_path", "x"]
    done = subprocess.run(
        [*command, "--dataset", "stdlib", "--draft_layers", "0"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "train-draft: error: draft_layers must be at least 1, got 0\n"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_read(path: Path) -> None:
    read = parse_arguments(ARGUMENTS, ["--config", str(path)], prog="train-draft", description="")
    assert tuple(map(type, read)) == ARGUMENTS and read[0].model_name_or_path
