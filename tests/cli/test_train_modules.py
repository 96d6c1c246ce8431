"""train-heads --mtp: what it trains drafts more than before, and the text stays the target's own;
mistakes are one sentence, and leave nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_heads.checkpoint.mtp_checkpoint import MTP_WEIGHTS, read_mtp_sidecar, save_mtp
from medusa_heads.cli.train_heads import main
from medusa_heads.cli.verbs.export import main as export
from medusa_heads.cli.verbs.generate import main as generate
from medusa_heads.contents import MTP_FILE
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.mtp import load_mtp
from medusa_heads.target.target import TargetModel
from tests.cli.conftest import Talk
from tests.conftest import TinyLlama
from tests.inference.native_modules import (
    needs_modules,
    read_target,
    with_tokenizer,
    write_checkpoint,
)

pytestmark = needs_modules
PROMPT = " ".join(f"w{i}" for i in range(20, 32))


def prompts(count: int) -> Tensor:
    return torch.randint(3, 190, (count, 6), generator=torch.Generator().manual_seed(5))


def own_text(target: TargetModel, path: Path) -> Path:
    """What a target writes behind random beginnings."""
    model: Any = target.model
    torch.manual_seed(0)
    drawn = {"do_sample": True, "temperature": 0.3, "top_k": 0, "max_new_tokens": 26}
    rows = model.generate(prompts(72), **drawn).tolist()
    path.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows))
    return path


def flags(target: Path, corpus: Path, output: Path, *more: str) -> list[str]:
    given = ["--mtp", "--model_name_or_path", str(target), "--dataset", str(corpus)]
    given += ["--output_dir", str(output), "--max_length", "32", "--eval_rows", "8"]
    given += ["--max_steps", "32", "--save_steps", "32", "--learning_rate", "1e-2"]
    given += ["--loss", "forward_kl"]
    given += ["--training_args", '{"use_cpu": true, "disable_tqdm": true}']
    return [*given, *more]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose two modules know nothing."""
    folder = tmp_path_factory.mktemp("base") / "target"
    return with_tokenizer(write_checkpoint("deepseek_v3", folder, right=False))


@pytest.fixture(scope="module")
def corpus(base: Path) -> Path:
    return own_text(read_target(base), base.parent / "own.jsonl")


@pytest.fixture(scope="module")
def trained(base: Path, corpus: Path) -> Path:
    assert main(flags(base, corpus, base.parent / "mtp")) == 0
    return base.parent / "mtp"


def tokens_per_step(target: TargetModel, modules: Path | None) -> float:
    """Over texts that stay what the target alone writes."""
    drafting: Any = TrainingFreeModel(target, "mtp", modules=modules, deterministic=True)
    ids_BT = prompts(80)[72:]
    model, options = cast(Any, target.model), {"max_new_tokens": 26, "do_sample": False}
    expected_BT = model.generate(ids_BT, **options)
    assert torch.equal(drafting.generate(ids_BT, **options), expected_BT)
    return float(drafting.last_stats.tokens_per_step)


def test_modules_gain_and_the_text_stays(base: Path, trained: Path) -> None:
    target = read_target(base)
    before, after = tokens_per_step(target, None), tokens_per_step(target, trained)
    assert after > before + 0.3
    measured = read_mtp_sidecar(trained)["measured"]
    assert measured["tokens_per_step"] > measured["before"]["tokens_per_step"]
    assert min(measured["top1"]) > max(measured["before"]["top1"])
    story = yaml.safe_load((trained / "run.yaml").read_text())
    assert story["mtp"]["mtp"] is True and story["target_weights_sha256"]
    stored = load_file(base / "model.safetensors")
    names = {name for name in stored if "layers.2." in name or "layers.3." in name}
    assert set(load_file(trained / MTP_WEIGHTS)) == names


@pytest.mark.slow
def test_modules_of_a_target_that_was_fine_tuned(tmp_path: Path) -> None:
    """transformers saves a target without its modules: they begin as those of the base."""
    base = write_checkpoint("glm4_moe", tmp_path / "base")
    tuned = read_target(base)
    tuned.model.requires_grad_(True)
    optimizer = torch.optim.AdamW(tuned.model.parameters(), 3e-3)
    rows = torch.stack([(torch.arange(32) * step + step) % 180 + 3 for step in range(1, 17)])
    for _ in range(25):
        tuned.model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.model.save_pretrained(tmp_path / "tuned")
    target = read_target(tmp_path / "tuned")
    with pytest.raises(ValueError, match="no multi-token-prediction modules can be read"):
        load_mtp(target)
    outdated = tmp_path / "outdated"
    save_mtp(outdated, load_mtp(target, base), target, source=base)
    before_tuning = tokens_per_step(read_target(base), None)
    before = tokens_per_step(target, outdated)
    assert before < before_tuning - 0.3
    corpus, output = own_text(target, tmp_path / "own.jsonl"), tmp_path / "mtp"
    more = ["--mtp_from", str(base), "--mtp_depth", "3", "--max_steps", "20", "--save_steps", "20"]
    assert main(flags(tmp_path / "tuned", corpus, output, *more)) == 0
    assert tokens_per_step(target, output) > before + 0.3
    assert len(read_mtp_sidecar(output)["measured"]["top1"]) == 3


def test_what_was_trained_drafts_on_the_command_line(
    base: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", PROMPT, "--max-new-tokens", "24", "--stats"]
    assert generate([str(base), "--drafter", "suffix", *options]) == 0
    plain = capsys.readouterr().out
    moved = shutil.copytree(trained, tmp_path / "moved")
    for more in ([], ["--drafter", "mtp+suffix"], ["--target", str(base)]):
        assert generate([str(moved), *more, *options]) == 0
        printed = capsys.readouterr()
        assert printed.out == plain and "tokens per step" in printed.err
    assert generate([str(moved), "--drafter", "suffix", *options]) == 2
    assert "draft as 'mtp' or 'mtp+suffix', not as 'suffix'" in capsys.readouterr().err


def test_settings_of_a_chat_keep_the_modules(
    base: Path, trained: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    init = TrainingFreeModel.__init__

    @wraps(init)
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        read.append((self.method, self.modules and Path(self.modules)))

    monkeypatch.setattr(TrainingFreeModel, "__init__", note)
    said = talk(trained, ["/set deterministic true", "w20 w21 w22", "/set drafter suffix", "w5"])
    assert read == [("mtp", trained), ("mtp", trained), ("suffix", None)]
    assert len(said.out.splitlines()) == 2


def test_a_copy_of_the_target_with_its_new_modules(
    base: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(trained), str(tmp_path / "whole"), "--to", "transformers"]) == 0
    whole, target = read_target(tmp_path / "whole"), read_target(base)
    assert whole.weights_digest() == target.weights_digest()
    assert tokens_per_step(whole, None) == pytest.approx(tokens_per_step(target, trained))
    stored, new = load_file(base / "model.safetensors"), load_file(trained / MTP_WEIGHTS)
    written: dict[str, Tensor] = {}
    for file in sorted((tmp_path / "whole").glob("*.safetensors")):
        written |= load_file(file)
    assert set(written) == set(stored)
    assert all(torch.equal(written[name], (stored | new)[name]) for name in written)
    assert export([str(trained), str(tmp_path / "other"), "--to", "vllm"]) == 2
    assert "give --to transformers" in capsys.readouterr().err
    assert (
        export(
            [
                str(trained),
                str(tmp_path / "other"),
                "--to",
                "transformers",
                "--target",
                str(other_target(base, tmp_path)),
            ]
        )
        == 2
    )
    assert "these modules were trained for another target" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def other_target(base: Path, tmp_path: Path) -> Path:
    """One of the same shape with another lm_head."""
    other = shutil.copytree(base, tmp_path / "unlike")
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return other


def _lacks_a_tensor(folder: Path) -> None:
    weights = list(load_file(folder / MTP_WEIGHTS).items())
    save_file(dict(weights[1:]), folder / MTP_WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_lacks_a_tensor, "its checksum differs"),
        (lambda folder: (folder / MTP_WEIGHTS).write_bytes(b"no"), "cannot be read"),
        (lambda folder: (folder / MTP_WEIGHTS).unlink(), "found none"),
        (
            lambda folder: (folder / MTP_FILE).write_text('{"format_version": 1}'),
            "no 'target' part",
        ),
        (lambda folder: (folder / MTP_FILE).write_text("["), "JSON"),
    ],
)
def test_damaged_modules(
    damage: Callable[[Path], Any],
    reason: str,
    base: Path,
    trained: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = shutil.copytree(trained, tmp_path / "damaged")
    damage(damaged)
    out, more = tmp_path / "out", ["--mtp_from", str(damaged)]
    refused(lambda: generate([str(damaged), "--prompt", "w5"]), reason, capsys)
    refused(lambda: export([str(damaged), str(out), "--to", "transformers"]), reason, capsys)
    refused(lambda: main(flags(base, corpus, out, *more)), reason, capsys)
    assert not out.exists() or not any(out.iterdir())


def refused(run: Callable[[], int], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run() == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert reason in error and len(error) < 600


def test_mistakes_are_one_sentence(
    base: Path,
    trained: Path,
    corpus: Path,
    tiny_llama: TinyLlama,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    tiny_llama(vocab_size=200).save_pretrained(plain)
    other = other_target(base, tmp_path)
    wrong: dict[str, tuple[Path, list[str]]] = {
        "train heads for it, or train the modules of the model": (plain, []),
        "these modules were trained for another target": (other, ["--mtp_from", str(trained)]),
        "mtp_depth must be at least 2, as many as the target has": (base, ["--mtp_depth", "1"]),
        "leave num_heads out": (base, ["--num_heads", "2"]),
        "leave kind out": (base, ["--kind", "hydra"]),
        "leave recipe out": (base, ["--recipe", "best"]),
        "leave joint out": (base, ["--joint"]),
        "leave hidden_cache out": (base, ["--hidden_cache", "auto"]),
        "leave load_in_4bit out": (base, ["--load_in_4bit"]),
        "the learning rate 1000 is too high": (base, ["--learning_rate", "1e3"]),
    }
    for reason, (target, more) in wrong.items():
        refused(lambda: main(flags(target, corpus, out, *more)), reason, capsys)  # noqa: B023
        assert not (out / MTP_FILE).exists() and not (out / MTP_WEIGHTS).exists()
    alone = [flag for flag in flags(base, corpus, out, "--mtp_depth", "2") if flag != "--mtp"]
    refused(lambda: main(alone), "add --mtp", capsys)


def test_a_dry_run_says_what_would_be_trained(
    base: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(flags(base, corpus, out, "--dry_run", "--mtp_depth", "3")) == 0
    assert "2 modules in 3 depths" in capsys.readouterr().out and not out.exists()


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    base: Path, corpus: Path, tmp_path: Path
) -> None:
    course = ["--max_steps", "4", "--save_steps", "2", "--save_total_limit", "4"]
    course += ["--load_best_model_at_end", "false"]
    assert main(flags(base, corpus, tmp_path / "whole", *course)) == 0
    ended = shutil.ignore_patterns("checkpoint-4", MTP_FILE)
    shutil.copytree(tmp_path / "whole", tmp_path / "halves", ignore=ended)
    again = [*course, "--resume_from_checkpoint", "last"]
    assert main(flags(base, corpus, tmp_path / "halves", *again)) == 0
    whole, halves = (load_file(tmp_path / name / MTP_WEIGHTS) for name in ("whole", "halves"))
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    before = [read_mtp_sidecar(tmp_path / n)["measured"]["before"] for n in ("whole", "halves")]
    assert before[0] == before[1]
