"""The command train-heads: a whole run on a tiny target, and every kind of bad input."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.cli.train_heads import ARGUMENTS, main
from medusa_heads.cli.verbs import generate
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.machine.products import Shape
from medusa_heads.target.target import TargetModel
from tests.conftest import Refused
from tests.measured import keep_products

CONFIGS = sorted(
    path
    for path in (Path(__file__).parents[2] / "configs").glob("*.yaml")
    if not path.name.startswith("draft-")  # train-draft's
)
WORDS = 50
SHAPE = Shape(hidden=16, intermediate=32, vocab=WORDS, layers=1)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 64 positions on disk, with a tokenizer of one token a word."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        for d in range(30):
            text = "\n".join(
                " ".join(f"w{(d + line * 3 + i) % WORDS}" for i in range(9)) for line in range(6)
            )
            file.write(json.dumps({"text": text}) + "\n")
    return path


def flags(target: Path, corpus: Path, output: Path, *more: str) -> list[str]:
    given = ["--model_name_or_path", str(target), "--dataset", str(corpus)]
    given += ["--output_dir", str(output), "--max_length", "32", "--max_steps", "2"]
    given += ["--training_args", '{"use_cpu": true, "disable_tqdm": true}']
    return [*given, *more]


@pytest.mark.parametrize("self_distill", [False, True])
def test_a_run_from_the_command_line(
    self_distill: bool,
    target_folder: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "run"
    more = ["--num_heads", "2"]
    if self_distill:
        more += ["--features", "0"]
        more += ["--self_distill", "--num_prompts", "8", "--num_eval_prompts", "2"]
        more += ["--prompt_length", "6", "--continuation_length", "10", "--eval_share", "0.2"]
    assert main(flags(target_folder, corpus, output, *more)) == 0
    shown = capsys.readouterr().out
    assert "Heads on held-out text" in shown and f"Checkpoint: {output}" in shown
    loaded = load_heads(output, TargetModel.from_pretrained(str(target_folder)))
    assert loaded.heads.config.num_heads == 2 and loaded.statistics is not None
    assert loaded.heads.config.features == ((0,) if self_distill else None)
    story = loaded.stored.provenance
    of_sets = [story[part]["supervised_tokens"] for part in ("training_set", "held_out_set")]
    assert (of_sets == [8 * 16, 2 * 10]) == self_distill  # prompts are learnt, and not measured
    assert (output / "metrics.json").is_file() and (output / "run.yaml").is_file()
    assert (output / "distilled").is_dir() == self_distill


def test_autocast_is_what_this_machine_trains_faster_with(
    target_folder: Path,
    corpus: Path,
    tmp_path: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = flags(target_folder, corpus, tmp_path / "run", "--num_heads", "2")
    for dtype, other in (("bfloat16", "float32"), ("float32", "bfloat16")):
        keep_products(SHAPE, {f"{dtype} 1": 0.1, f"{other} 1": 0.2}, "train")
        assert main([*given, "--dry_run", "--measure_steps", "false"]) == 0
        assert f"training: cpu, 1 thread, {dtype}: " in capsys.readouterr().err
    keep_products(SHAPE, {"bfloat16 1": 0.1, "float32 1": 0.2}, "train")
    for flag, bf16 in ((["--bf16", "false"], False), ([], True)):
        assert main([*given, *flag, "--overwrite_output_dir"]) == 0
        told = capsys.readouterr().err
        assert ("training: " in told) == bf16
        assert "target: cpu, 1 thread, float32 as its weights are stored" in told
        story = load_heads(tmp_path / "run", TargetModel.from_pretrained(str(target_folder)))
        assert story.stored.provenance["training_arguments"].get("bf16", False) == bf16
    # A run that goes on does so in its own precision, whatever is faster by now.
    keep_products(SHAPE, {"bfloat16 1": 0.2, "float32 1": 0.1}, "train")
    assert main([*given, "--num_train_epochs", "3", "--resume_from_checkpoint", "last"]) == 0
    assert "training: cpu, 1 thread, bfloat16 as in the checkpoint" in capsys.readouterr().err


def test_a_run_goes_on_with_its_target_in_the_same_dtype(
    target_folder: Path,
    corpus: Path,
    tmp_path: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where another one is faster by now: its hidden states would be others."""
    halved = shutil.copytree(target_folder, tmp_path / "halved")
    AutoModelForCausalLM.from_pretrained(target_folder, dtype="bfloat16").save_pretrained(halved)
    given = flags(halved, corpus, tmp_path / "run", "--num_heads", "2", "--bf16", "false")
    keep_products(SHAPE, {"bfloat16 1": 0.2, "float32 1": 0.1}, "batch")
    assert main(given) == 0 and "thread, float32: this CPU" in capsys.readouterr().err
    keep_products(SHAPE, {"bfloat16 1": 0.1, "float32 1": 0.2}, "batch")
    assert main([*given, "--num_train_epochs", "3", "--resume_from_checkpoint", "last"]) == 0
    assert "target: cpu, 1 thread, float32 as in the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nobody/nothing", "./nothing"])
def test_nothing_is_measured_where_there_is_no_target(
    name: str, corpus: Path, tmp_path: Path, cache: Path, refused: Refused
) -> None:
    given = ["--model_name_or_path", name, "--dataset", str(corpus)]
    assert name.strip("./") in refused(main, [*given, "--output_dir", str(tmp_path / "heads")])
    assert not cache.exists()


def test_heads_and_adapter_from_the_command_line(
    target_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    more = ["--joint", "--lora_r", "4", "--lora_target_modules", "q_proj", "up_proj"]
    more += ["--joint_warmup_steps", "1", "--max_steps", "3"]
    assert main(flags(target_folder, corpus, output, *more)) == 0
    assert "the target's own held-out loss" in capsys.readouterr().out
    config = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], set(config["target_modules"])) == (4, {"q_proj", "up_proj"})
    given = [str(output), "--prompt", "w1 w4 w7", "--max_new_tokens", "8", "--tree", "8"]
    assert generate.main(given) == 0
    assert len(capsys.readouterr().out.split()) == 3 + 8  # the prompt comes first


def test_hidden_states_are_kept_and_read(
    target_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ["--hidden_cache_dir", str(tmp_path / "cache"), "--hidden-cache"]
    for mode in ("auto", "read"):
        more = [*cache, mode, "--max_steps", "-1"]
        assert main(flags(target_folder, corpus, tmp_path / mode, *more)) == 0
    shown = capsys.readouterr().out
    assert " to be written (" in shown and f" read from {tmp_path / 'cache'}" in shown


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--model_name_or_path", "nowhere/at-all"], "expected a causal language model"),
        (["nowhere.jsonl"], "expected a corpus at 'nowhere.jsonl', found none"),
        (["EMPTY"], "is empty"),
        (["--config", "UNKNOWN"], "unknown key 'num_headz'; did you mean 'num_heads'?"),
        (["--num_heads", "0"], "num_heads must be at least 1, got 0"),
        (["--features", "9"], "features asks for layer 9, and LlamaForCausalLM has the layers 0"),
        (["--features", "1", "1"], "features must be different numbers of layers"),
        (["--max_length", "65"], "do not fit the target's context of 64: lower max_length"),
        (
            ["--self_distill", "--prompt_length", "60", "--continuation_length", "5"],
            "do not fit the target's context of 64",
        ),
        (["--training_args", '{"frobnicate": 1}'], "has no field 'frobnicate'"),
        (["--resume_from_checkpoint", "last"], "nothing to resume"),
        (["--hidden_cache", "read"], "holds no hidden states of this target and text"),
        (["--hidden_cache", "on"], "invalid choice: 'on' (choose from 'off', 'read'"),
        (["--hidden_cache_dir", "x"], "hidden_cache_dir is given but hidden_cache is off"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    more: list[str],
    sentence: str,
    target_folder: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "unknown.yaml").write_text("num_headz: 3\n")
    files = {"EMPTY": tmp_path / "empty.jsonl", "UNKNOWN": tmp_path / "unknown.yaml"}
    given = [str(files.get(flag, flag)) for flag in more]
    text = corpus if given[1:] else Path(given.pop())
    assert main(flags(target_folder, text, tmp_path / "run", *given)) == 2
    shown = capsys.readouterr().err
    message = shown.splitlines()[-1]  # a progress bar of loading weights may stand before it
    assert message.startswith("train-heads: error: ") and sentence in message
    assert "Traceback" not in shown
    assert not (tmp_path / "run" / "medusa_heads.json").exists()


def test_a_process_exits_with_2_and_prints_no_traceback(tmp_path: Path) -> None:
    code = "import sys; from medusa_heads.cli.train_heads import main; sys.exit(main())"
    flags = ["--num_heads", "0", "--model_name_or_path", "x", "--dataset", "stdlib"]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "train-heads: error: num_heads must be at least 1, got 0\n"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_read(path: Path) -> None:
    read = parse_arguments(ARGUMENTS, ["--config", str(path)], prog="train-heads", description="")
    assert tuple(map(type, read)) == ARGUMENTS and read[0].model_name_or_path


@pytest.mark.parametrize("given", ["some", "0"])
def test_a_draft_vocabulary_is_a_number_or_a_word(given: str, refused: Refused) -> None:
    flags = ["--model_name_or_path", "nowhere", "--dataset", "stdlib", "--draft_vocab_size", given]
    assert "draft_vocab_size must be" in refused(main, flags)


@pytest.mark.parametrize(("given", "size"), [("all", None), (str(WORDS // 2), WORDS // 2)])
def test_a_draft_vocabulary_from_a_file(
    given: str,
    size: int | None,
    target_folder: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A number is one in YAML as well; a dry run plans with it."""
    (tmp_path / "run.yaml").write_text(f"draft_vocab_size: {given}\n")
    more = ["--config", str(tmp_path / "run.yaml"), "--dry_run", "--measure_steps", "false"]
    assert main(flags(target_folder, corpus, tmp_path / "run", *more)) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (f"drafting {size} of {WORDS} tokens" in shown) == (size is not None)


def test_a_layer_that_goes_on_from_behind_its_norm(
    target_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = flags(target_folder, corpus, tmp_path / "run", "--kind", "eagle3", "--norm_output")
    assert main([*given, "--dry_run"]) == 0
    assert "behind the last norm: " in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert main(given) == 0
    loaded = load_heads(tmp_path / "run", TargetModel.from_pretrained(str(target_folder)))
    assert loaded.heads.config.decoder == replace(DecoderShape.of_width(16), norm_output=True)


@pytest.mark.parametrize("more", [[], ["--joint"], ["--overwrite_output_dir"]])
def test_no_model_is_written_over(
    more: list[str], target_folder: Path, corpus: Path, refused: Refused
) -> None:
    before = {path.name: path.read_bytes() for path in target_folder.iterdir()}
    for target, said in ((target_folder, "where this run would write over it"), ("x/y", "no run")):
        given = flags(Path(target), corpus, target_folder, *more)
        assert said in refused(main, given)
    assert {path.name: path.read_bytes() for path in target_folder.iterdir()} == before


@pytest.mark.parametrize("heads", [["--kind", "hydra"], ["--usual_features"]])
def test_a_vocabulary_matrix_for_heads_that_take_none_is_refused_at_once(
    heads: list[str], refused: Refused
) -> None:
    flags = ["--model_name_or_path", "nowhere", "--dataset", "stdlib", "--with_vocab_matrix"]
    assert "no engine reads it beside others: leave it out" in refused(main, [*flags, *heads])
