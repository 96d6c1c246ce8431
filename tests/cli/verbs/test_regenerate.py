"""The verb regenerate: a dataset that train-heads reads, and a record of where it came from."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from datasets import Dataset, load_from_disk

from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.cli import train_heads
from medusa_heads.cli.verbs.regenerate import main
from medusa_heads.config import HeadsConfig
from medusa_heads.data.sources import load_corpus
from medusa_heads.heads import MedusaHeads
from medusa_heads.inference.regeneration.arguments import longest_answer
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.inference.regeneration.completion_server import serving
from tests.inference.speaking import make_tokenizer, save_speaker

QUESTIONS = [f"what is {word}" for word in ("love", "time", "this", "up", "new", "on")]


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, heads for it, and a corpus of conversations."""
    folder = tmp_path_factory.mktemp("regenerate")
    save_speaker(folder / "target", tiny_llama)
    target = TargetModel.from_pretrained(str(folder / "target"))
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    save_heads(folder / "heads", heads, target)
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    Dataset.from_dict({"messages": talks}).to_json(folder / "talks.jsonl")
    return folder


def run(folder: Path, output: Path, *more: str) -> int:
    given = ["--model_name_or_path", str(folder / "target"), "--output_dir", str(output)]
    if "--dataset" not in more:
        given += ["--dataset", str(folder / "talks.jsonl")]
    return main([*given, "--max_new_tokens", "8", *more])


def test_train_heads_learns_from_what_regenerate_wrote(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "own"
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        assert run(folder, Path("~/own")) == 0
    shown = capsys.readouterr().out
    assert "asked 6 = done 6 + failed 0 + skipped 0" in shown and str(output) in shown
    rows = load_from_disk(str(output))
    assert rows.column_names == ["input_ids", "labels"] and len(rows) == 6
    record = json.loads((output / "regeneration.json").read_text())
    assert record["accounting"]["done"] == record["rows"] == 6
    assert record["settings"]["temperature"] == 0.7 and "transformers" in record["versions"]
    assert len(record["answers"]["weights_sha256"]) == 64
    assert record["target"]["model_type"] == "llama"

    assert train(folder, output, tmp_path / "run") == 0


def train(folder: Path, rows: Path, output: Path) -> int:
    given = ["--model_name_or_path", str(folder / "target"), "--dataset", str(rows)]
    given += ["--output_dir", str(output), "--num_heads", "2", "--max_steps", "1"]
    given += ["--eval_share", "0.4", "--training_args", '{"use_cpu": true, "disable_tqdm": true}']
    return train_heads.main(given)


def test_a_targets_answers_to_plain_prompts_need_no_template(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        json.dumps({"prompt": f"{asked} and {more}"}) for asked in QUESTIONS for more in "abcd"
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    output, moved = tmp_path / "own", tmp_path / "moved"
    assert run(folder, output, "--dataset", str(tmp_path / "prompts.jsonl")) == 0
    capsys.readouterr()
    assert train(folder, output, tmp_path / "run") == 0
    assert "template" not in capsys.readouterr().err
    # Of rows that nothing says who wrote them it may be asked.
    load_from_disk(str(output)).save_to_disk(str(moved))
    assert train(folder, moved, tmp_path / "other") == 0
    assert "the template of the training set is not the target's" in capsys.readouterr().err


def test_a_targets_answers_may_be_cut_anywhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [f"{question} and {more}" for question in QUESTIONS for more in "abcd"]
    talks = [[{"role": "user", "content": question}] for question in asked]
    Dataset.from_dict({"messages": talks}).to_json(tmp_path / "talks.jsonl")
    output, cut = tmp_path / "own", tmp_path / "cut"
    assert run(folder, output, "--dataset", str(tmp_path / "talks.jsonl")) == 0

    def ends_alike(row: dict[str, list[int]]) -> dict[str, list[int]]:
        return {name: [*tokens[:-1], 5] for name, tokens in row.items()}

    load_from_disk(str(output)).map(ends_alike).save_to_disk(str(cut))
    assert train(folder, cut, tmp_path / "other") == 0
    assert "0 of 14 answers end with a token that ends its text" in capsys.readouterr().err
    shutil.copy(output / "regeneration.json", cut)
    assert train(folder, cut, tmp_path / "run") == 0
    assert "template" not in capsys.readouterr().err


def test_the_same_command_again_reads_and_more_prompts_go_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, tmp_path, "--num_prompts", "4") == 0
    first = load_from_disk(str(tmp_path)).to_dict()
    assert run(folder, tmp_path, "--batch_size", "1") == 0
    assert "done 6 (4 of them by an earlier run)" in capsys.readouterr().out
    second = load_from_disk(str(tmp_path)).to_dict()
    assert second["input_ids"][:4] == first["input_ids"]
    assert not list(tmp_path.glob(".dataset-*"))
    assert "warning" not in capsys.readouterr().err
    assert run(folder, tmp_path, "--num_prompts", "5") == 0
    said = f"warning: {str(tmp_path)!r} held 6 rows, and now holds the 5 that were asked for"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["heads", "continuous"])
def test_other_backends_write_the_same_rows(backend: str, folder: Path, tmp_path: Path) -> None:
    heads = ["--heads", str(folder / "heads")] if backend == "heads" else []
    assert run(folder, tmp_path / "plain") == 0
    assert run(folder, tmp_path / backend, "--backend", backend, *heads) == 0
    expected = load_from_disk(str(tmp_path / "plain")).to_dict()
    assert load_from_disk(str(tmp_path / backend)).to_dict() == expected


def test_a_transformers_that_batches_in_another_way_is_told(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the backend is made of it may move. The others need none of it."""
    own = "medusa_heads.inference.regeneration.continuous_backend"
    monkeypatch.delitem(sys.modules, own, raising=False)
    theirs = "transformers.generation.continuous_batching.cb_logits_processors"
    monkeypatch.setitem(sys.modules, theirs, None)
    assert run(folder, tmp_path / "own", "--backend", "continuous") == 2
    assert "choose another backend" in capsys.readouterr().err
    assert run(folder, tmp_path / "own") == 0


def test_a_server_answers_without_the_weights_here(folder: Path, tmp_path: Path) -> None:
    target = TargetModel.from_pretrained(str(folder / "target"))
    bare = tmp_path / "bare"  # tokenizer and configuration alone
    make_tokenizer().save_pretrained(bare)
    for name in ("config.json", "generation_config.json"):
        (bare / name).write_bytes((folder / "target" / name).read_bytes())
    assert run(folder, tmp_path / "plain", "--greedy_share", "1") == 0
    with serving(target.model, make_tokenizer()) as server:
        more = ["--backend", "server", "--base_url", server.url, "--greedy_share", "1"]
        more += ["--model_name_or_path", str(bare), "--model", "served"]
        assert run(folder, tmp_path / "there", *more) == 0
    assert {request["model"] for request in server.requests} == {"served"}
    expected = load_from_disk(str(tmp_path / "plain")).to_dict()
    assert load_from_disk(str(tmp_path / "there")).to_dict() == expected


def test_shards_are_datasets_that_are_joined(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, tmp_path / "whole") == 0
    for index in ("0", "1"):
        shard = ["--num_shards", "2", "--shard_index", index]
        assert run(folder, tmp_path / "shards" / index, *shard) == 0
    assert not list(tmp_path.rglob("rows-*"))  # what the dataset was copied from
    whole = load_from_disk(str(tmp_path / "whole"))["input_ids"][:]
    joined = load_corpus(str(tmp_path / "shards" / "*")).rows["input_ids"][:]
    assert joined == whole[0::2] + whole[1::2]
    for taken, holds in (("shards/0", "shard 0 of 2"), ("whole", "all rows")):
        assert run(folder, tmp_path / taken, *shard) == 2  # the other shard, to the wrong place
        assert f"holds {holds}: give another output_dir" in capsys.readouterr().err
    assert load_from_disk(str(tmp_path / "whole"))["input_ids"][:] == whole


def test_several_corpora_are_joined_also_with_commas_between_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    for name in names:
        Path(name).write_text(f'{{"prompt": "what is {Path(name).stem}"}}\n')
    read = []
    for given, reused in ((names, ""), ([",".join(names)], "2 of them by an earlier run")):
        assert run(folder, tmp_path / "own", "--dataset", *given) == 0
        assert "asked 2 = done 2" in (shown := capsys.readouterr().out) and reused in shown
        record = json.loads((tmp_path / "own" / "regeneration.json").read_text())
        assert record["settings"]["dataset"] == given
        read.append(load_from_disk(str(tmp_path / "own")).to_dict())
    assert read[0] == read[1]


def test_answers_take_half_of_a_short_context_unless_asked_otherwise(
    folder: Path, tmp_path: Path
) -> None:
    few = ["--model_name_or_path", str(folder / "target"), "--output_dir", str(tmp_path)]
    few += ["--dataset", str(folder / "talks.jsonl"), "--num_prompts", "1"]
    assert main([*few, "--batch_size", "1"]) == 0
    record = json.loads((tmp_path / "regeneration.json").read_text())
    assert record["answers"]["sampling"]["max_new_tokens"] == 256  # of 512
    assert longest_answer(131_072) == longest_answer(None) == 2048


def test_strict_is_an_error_where_an_answer_is_missing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "prompts.jsonl"
    corpus.write_text('{"prompt": "fine"}\n{"prompt": ""}\n')
    given = ["--dataset", str(corpus)]
    assert run(folder, tmp_path / "a", *given) == 0
    assert run(folder, tmp_path / "b", *given, "--strict") == 2
    shown = capsys.readouterr()
    assert "skipped 1 (1 nothing to answer)" in shown.out
    assert "1 of 2 answers are missing, and strict was asked for" in shown.err
    assert len(load_from_disk(str(tmp_path / "b"))) == 1  # what there is, is there


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--backend", "heads"], "the backend heads needs --heads"),
        (["--backend", "server"], "the backend server needs --base_url"),
        (["--backend", "vllm"], "the backend vllm needs vLLM, and it is not installed"),
        (["--engine_args", "{}"], "engine_args is read by the backend vllm alone"),
        (["--backend", "vllm", "--batch_size", "2"], "max_num_seqs in --engine_args"),
        (["--backend", "vllm", "--engine_args", '{"model": "x"}'], "cannot name the model"),
        (["--base_url", "http://x/v1"], "base_url is read by the backend server alone"),
        (["--num_workers", "2", "--backend", "continuous"], "num_workers is read by"),
        (["--max_new_tokens", "0"], "max_new_tokens must be at least 1"),
        (["--temperature", "0"], "temperature must be above 0"),
        (["--top_p", "1.5"], "top_p must be at most 1, got 1.5"),
        (["--top_k", "0"], "top_k must be at least 1"),
        (["--num_shards", "2", "--shard_index", "2"], "expected a shard_index from 0 to 1, got 2"),
        (["--num_shards", "9", "--shard_index", "8"], "expected rows in shard 8 of 9, got 6"),
        (["--max_new_tokens", "600"], "6 too long for the target's context"),
        (["--dataset", "./nowhere.jsonl"], "expected a corpus at './nowhere.jsonl', found none"),
        (["--dataset", "BOTS"], "bots.jsonl:2: message 0 of 'messages' has the role 'bot', expec"),
        (["--chat_template_kwargs", "{"], "chat_template_kwargs must be a JSON object"),
        (["--output_dir", "TAKEN"], "was not made by regenerate"),
        (["--frobnicate", "1"], "unknown argument '--frobnicate'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    more: list[str],
    sentence: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Dataset.from_dict({"a": [1]}).save_to_disk(str(tmp_path / "taken"))
    bots = [{"messages": [{"role": role, "content": "Hi"}]} for role in ("user", "bot")]
    (tmp_path / "bots.jsonl").write_text("\n".join(map(json.dumps, bots)))
    made = {"TAKEN": str(tmp_path / "taken"), "BOTS": str(tmp_path / "bots.jsonl")}
    given = [made.get(flag, flag) for flag in more]
    assert run(folder, tmp_path / "out", *given) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("medusa-heads: error: ") and sentence in message
    assert not (tmp_path / "out" / "state.json").exists()
