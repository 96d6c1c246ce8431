"""train-heads on conversations with images: a whole run, its heads behind an image, bad inputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from medusa_heads import MedusaModel
from medusa_heads.cli.train_heads import main
from medusa_heads.cli.verbs.prepare_hidden import main as prepare_hidden
from tests.training import seeing
from tests.training.seeing import SEVERAL, image, talk

KIND = "llava"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return seeing.save_target(KIND, tmp_path_factory.mktemp("target"))


def flags(target: str, file: str, output: Path, *more: str) -> list[str]:
    given = ["--model_name_or_path", target, "--dataset", file, "--output_dir", str(output)]
    given += ["--eval_dataset", file, "--max_length", "200", "--max_steps", "4"]
    given += [
        "--num_heads",
        "2",
        "--per_device_train_batch_size",
        "3",
        "--dtype",
        "float32",
        "--logging_steps",
        "1",
    ]
    given += ["--training_args", '{"use_cpu": true, "disable_tqdm": true}']
    return [*given, *more]


Refused = Callable[[list[str]], str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Of a run that ends, behind what it shows, with one sentence and exit code 2: that one."""

    def run(given: list[str]) -> str:
        assert main(given) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said and said.count("error:") == 1
        return said[said.index("train-heads: error:") :]

    return run


def losses(output: Path) -> list[float]:
    states = sorted(output.glob("checkpoint-*/trainer_state.json"))
    log = json.loads(states[-1].read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def test_heads_learn_behind_images_and_decode_there(
    target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = seeing.corpus(tmp_path, SEVERAL)
    assert main(flags(target_folder, file, tmp_path / "heads")) == 0
    assert "capital of France" not in capsys.readouterr().err
    processor = seeing.processor(KIND)
    model: Any = MedusaModel.from_pretrained(str(tmp_path / "heads"))
    picture = Image.open(tmp_path / "b.png")
    asked = talk({"type": "image", "image": picture}, "What is this?")[:1]
    inputs = processor.apply_chat_template(
        asked, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    given: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.target.model.generate(**inputs, **given)
    assert torch.equal(model.generate(**inputs, **given), expected)

    # From a cache of hidden states the very same is learnt, whoever wrote it.
    kept = ["--hidden_cache_dir", str(tmp_path / "states")]
    assert prepare_hidden(flags(target_folder, file, tmp_path / "none", *kept)) == 0
    cached = flags(target_folder, file, tmp_path / "cached", "--hidden_cache", "read", *kept)
    assert main(cached) == 0
    assert losses(tmp_path / "cached") == losses(tmp_path / "heads")
    # And of a run that was stopped, with the rest of it.
    resumed = flags(target_folder, file, tmp_path / "heads", "--resume_from_checkpoint", "last")
    assert main([*resumed, "--max_steps", "6"]) == 0
    capsys.readouterr()
    assert main(flags(target_folder, file, tmp_path / "dry", "--dry_run")) == 0
    said = capsys.readouterr().out
    assert "No step was measured: an image costs what no number of tokens tells" in said


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_is_gone_ends_the_run_with_a_sentence(
    workers: int, target_folder: str, tmp_path: Path, refused: Refused
) -> None:
    file = seeing.corpus(tmp_path, SEVERAL)
    assert main(flags(target_folder, file, tmp_path / "dry", "--dry_run")) == 0  # prepares rows
    (tmp_path / "a.png").unlink()
    told = {"use_cpu": True, "disable_tqdm": True, "dataloader_num_workers": workers}
    given = flags(target_folder, file, tmp_path / "heads")
    given[given.index("--training_args") + 1] = json.dumps(told)
    assert re.fullmatch(r"train-heads: error: there is no image '.*a.png'", refused(given).strip())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (talk(image("none.png"), "?"), "there is no image .*none.png"),
        (talk(image("damaged.png"), "?"), "damaged.png' is none that can be read"),
        (talk(image(), "?"), "'images' holds 0 images, and the messages have parts for 1"),
        (talk(image("https://x.org/a.png"), "?"), "nothing is fetched"),
        (talk(image("a.png"), "<image>?"), "'<image>' 2 times for 1 images"),
    ],
)
def test_broken_rows_are_named_by_place(
    row: Any, reason: str, target_folder: str, tmp_path: Path, refused: Refused
) -> None:
    file = seeing.corpus(tmp_path, [*SEVERAL, {"messages": row}])
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "damaged.png").write_bytes(whole[: len(whole) // 2])
    said = refused(flags(target_folder, file, tmp_path / "heads"))
    assert "the corpus has 1 broken row" in said and "chats.jsonl:5" in said
    assert re.search(reason, said)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--packing"], "packing joins texts"),
        (["--joint"], "what is trained here does not learn from such"),
        (["--joint", "--dry_run"], "what is trained here does not learn from such"),
        (["--streaming"], "a stream is read as text alone"),
        (["--self_distill"], "self_distill draws prompts from a table of plain text"),
    ],
)
def test_what_cannot_be_done_with_images_is_said(
    more: list[str], reason: str, target_folder: str, tmp_path: Path, refused: Refused
) -> None:
    file = seeing.corpus(tmp_path, SEVERAL)
    assert reason in refused(flags(target_folder, file, tmp_path / "heads", *more))


def test_rows_whose_images_do_not_fit_are_left_out_and_counted(
    target_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: Refused
) -> None:
    """The answer of row 3 begins at token 61, and the image of row 4 ends there."""
    file = seeing.corpus(tmp_path, SEVERAL)
    more = ["--max_length", "60", "--on_bad_row", "skip"]
    assert main(flags(target_folder, file, tmp_path / "heads", *more)) == 0
    said = caplog.text
    assert "2 rows of" in said and "were left out: within max_length 60" in said
    alone = seeing.corpus(tmp_path, SEVERAL[2:3])
    said = refused(flags(target_folder, alone, tmp_path / "none", "--max_length", "30"))
    assert "all 1 rows of" in said and "raise max_length" in said


def test_a_target_of_text_is_shown_no_images(tmp_path: Path, refused: Refused) -> None:
    file = seeing.corpus(tmp_path, SEVERAL)
    target = "assets/demo-target"
    (tmp_path / "chat.jinja").write_text(seeing.CHAT)
    more = ["--chat_template", str(tmp_path / "chat.jinja")]
    said = refused(flags(target, file, tmp_path / "heads", *more))
    assert "3 broken rows" in said and "the target reads text alone" in said
    # But a column of that name beside texts is none of its business.
    texts = [{"messages": talk(f"{n}?", answer=f"No. {n}."), "images": ["b.png"]} for n in "123"]
    assert main(flags(target, seeing.corpus(tmp_path, texts), tmp_path / "heads", *more)) == 0
