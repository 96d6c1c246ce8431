"""The command train-heads on conversations: masked, packed, shown, streamed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_heads.cli.train_heads import main
from tests.pairs import with_slow
from tests.training import templates


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a chat template of its own."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = templates.chat_tokenizer()
    tokenizer.chat_template = templates.CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Forty conversations and a broken line."""
    path = tmp_path / "chats.jsonl"
    with path.open("w") as file:
        for i in range(40):
            turns = [("user", f"Question {i}?"), ("assistant", f"The answer is {i}, as ever.")]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
        file.write('{"messages": []}\n')
    return path


def flags(target: Path, chats: Path, output: Path, *more: str) -> list[str]:
    given = ["--model_name_or_path", str(target), "--dataset", str(chats), "--num_heads", "2"]
    given += ["--output_dir", str(output), "--max_length", "100", "--max_steps", "2"]
    given += ["--training_args", '{"use_cpu": true, "disable_tqdm": true}']
    return [*given, *more]


def test_broken_rows_end_the_command_unless_they_may_be_left_out(
    target_folder: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(target_folder, chats, tmp_path / "run")) == 2
    assert f"{chats}:41: 'messages' is empty): mend them" in capsys.readouterr().err


def test_prompts_for_the_target_are_not_drawn_from_conversations(
    target_folder: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--self_distill", "--on_bad_row", "skip"]
    assert main(flags(target_folder, chats, tmp_path / "run", *more)) == 2
    assert "have it answered with medusa-heads regenerate, and train" in capsys.readouterr().err


@pytest.mark.parametrize("mode", with_slow(["--packing"], ["--streaming"]))
def test_conversations_are_learnt_from_and_one_is_shown(
    mode: str,
    target_folder: Path,
    chats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = [mode, "--on_bad_row", "skip", "--eval_rows", "6"]
    assert main(flags(target_folder, chats, tmp_path / "run", *more)) == 0
    shown = capsys.readouterr().out
    assert "tokens are learnt (green)" in shown and "as ever.<|im_end|>" in shown
    story = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    [corpus] = story["corpora"]
    assert (corpus["format"], corpus["bad_rows"]) == ("messages", 1)
    assert story["held_out_set"]["rows"] == 6 and story["data"]["dataset"] == [str(chats)]
    if mode == "--packing":
        assert story["training_set"]["packed_rows"] < story["training_set"]["rows"] == 34


def test_a_mistyped_path_is_answered_before_torch_is_loaded(tmp_path: Path) -> None:
    script = (
        "import sys; from medusa_heads.cli.train_heads import main; "
        "code = main(['--model_name_or_path', 'x', '--dataset', './nope.jsonl']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "expected a corpus at './nope.jsonl', found none" in done.stderr


def test_nothing_is_said_of_the_template_of_text_that_the_target_continued(
    target_folder: Path, tmp_path: Path
) -> None:
    """Its prompts are windows of plain text, behind which it was asked without its template."""
    corpus = tmp_path / "texts.jsonl"
    lines = (json.dumps({"text": f"user says {i}, assistant says {i} " * 9}) for i in range(40))
    corpus.write_text("\n".join(lines))
    distilled = ["--self_distill", "--num_prompts", "16", "--num_eval_prompts", "4"]
    distilled += ["--prompt_length", "8", "--continuation_length", "16"]
    assert main(flags(target_folder, corpus, tmp_path / "run", *distilled)) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["warnings"] == []


def test_a_dry_run_plans_the_steps_of_the_run(
    target_folder: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = flags(target_folder, chats, tmp_path / "run", "--on_bad_row", "skip", "--max_steps=-1")

    def planned(*more: str) -> str:
        assert main([*given, *more, "--dry_run", "--measure_steps", "false"]) == 0
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        (steps,) = re.findall(r"steps (\d+ of \d+) rows", shown)
        return str(steps)

    def taken(*more: str) -> int:
        assert main([*given, *more]) == 0
        steps: int = json.loads((tmp_path / "run" / "metrics.json").read_text())["steps"]
        return steps

    few = planned("--num_train_epochs", "1")
    assert few == f"{taken('--num_train_epochs', '1')} of 11" == "4 of 11"
    overwritten = "--num_train_epochs", "1", "--overwrite_output_dir"
    assert taken(*overwritten, "--per_device_train_batch_size", "8") == 5
    on = "--num_train_epochs", "2", "--resume_from_checkpoint", "last"
    assert planned(*on) == "10 of 8" and taken(*on) == 10


def test_a_dry_run_refuses_what_leaves_no_batch(
    target_folder: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = flags(target_folder, chats, tmp_path / "run", "--on_bad_row", "skip")
    settings = '{"use_cpu": true, "dataloader_drop_last": true}'
    given += ["--training_args", settings, "--per_device_train_batch_size", "64"]
    for more in ([], ["--dry_run"]):
        assert main([*given, *more]) == 2
        told = capsys.readouterr().err
        assert "dataloader_drop_last leaves no batch: 38 rows do not fill one of 64" in told
