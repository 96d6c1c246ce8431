"""The records of a checkpoint as others read them: made by allow-lists, and nothing private."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medusa_heads.hub.published import published_story
from medusa_heads.hub.push import prepare_push
from medusa_heads.training.measure.report import write_report
from tests.training.measure.test_report import by_hand

TOKEN = "hf_abcdefghijklmnop"
W_AND_B = "0123456789abcdef0123456789abcdef01234567"
PRIVATE = [
    TOKEN, W_AND_B, "hunter2", "sk-proj-abcdef1234567890", "acme-merger", "/home/alice",
    "alice@example.org", "What the customer wrote", "customer.jsonl",
]  # fmt: skip
STORY: dict[str, Any] = {
    "argv": ["/home/alice/bin/train-heads", f"--hub_token={TOKEN}", "acme-merger"],
    "environment": {"HF_TOKEN": TOKEN, "HOME": "/home/alice"},
    "note": "What the customer wrote",
    "command": "train-heads",
    "created": "2026-11-21T09:53:02+00:00",
    "python": "3.11.7",
    "versions": {"torch": "2.13.0+cpu", "peft": None, "acme-merger fork": "1"},
    "git_sha": "caac9f0c99b3790ce20e606dc608260206212702",
    "heads": {"kind": "medusa", "num_heads": 2},
    "loss": {"terms": ["ce", "kl"], "weight": 0.8, "api_key": "hunter2", "x": W_AND_B},
    "training_set": {"rows": 40, "sha256": "a" * 64, "supervised_tokens": 7},
    "corpora": [{"name": "acme-merger", "bad_row_examples": ["What the customer wrote"]}],
    "data": {
        "dataset": [
            "trl-lib/Capybara",
            "data/customer.jsonl",
            "/home/alice/x",
            "stdlib",
            "acme-merger",
        ],
        "chat_template": "/home/alice/template.jinja",
        "chat_template_kwargs": {"user": "alice@example.org"},
        "text_column": "acme-merger",
        "max_length": 512,
        "packing": True,
    },
    "distillation": {"self_distill": True, "distill_cache": "acme-merger", "temperature": 0.7},
    "training_arguments": {
        "learning_rate": 0.005,
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"deep": [{"password": "hunter2", "path": "/home/alice"}]},
        "optim_args": "a=sk-proj-abcdef1234567890",
        "hub_token": TOKEN,
    },
}
TOLD = {
    "command": "train-heads",
    "created": "2026-11-21T09:53:02+00:00",
    "python": "3.11.7",
    "versions": {"torch": "2.13.0+cpu", "peft": None},
    "git_sha": "caac9f0c99b3790ce20e606dc608260206212702",
    "heads": {"kind": "medusa", "num_heads": 2},
    "loss": {"terms": ["ce", "kl"], "weight": 0.8},
    "training_set": {"rows": 40, "sha256": "a" * 64, "supervised_tokens": 7},
    "data": {
        "dataset": ["trl-lib/Capybara", "local data", "stdlib"],
        "max_length": 512,
        "packing": True,
    },
    "distillation": {"self_distill": True, "temperature": 0.7},
    "training_arguments": {
        "learning_rate": 0.005,
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"deep": [{}]},
    },
}


def change(file: Path, **values: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) | values
    file.write_text(json.dumps(content))
    return content


def pushed(checkpoint: Path, **options: Any) -> dict[str, bytes]:
    files = prepare_push(checkpoint, "alice/heads", **options).files
    return {n: what if isinstance(what, bytes) else what.read_bytes() for n, what in files.items()}


def test_what_is_told_of_how_heads_came_to_be() -> None:
    assert published_story(STORY) == TOLD
    assert published_story(published_story(STORY)) == TOLD
    origin = {"format": "vllm", "source": "/home/alice/heads"}
    assert published_story({"converted_from": origin}) == {
        "converted_from": {"format": "vllm", "source": "local data"}
    }


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_no_json_are_not_told(
    number: float, checkpoint: Path, tmp_path: Path
) -> None:
    story = {"loss": {"weight": number, "terms": ["ce"]}, "data": {"max_length": number}}
    told = published_story(story | {"training_arguments": {"adam_betas": [0.9, number]}})
    assert told == {
        "loss": {"terms": ["ce"]},
        "data": {},
        "training_arguments": {"adam_betas": [0.9]},
    }
    write_report(checkpoint, by_hand())
    change(checkpoint / "report.json", calibration=number)
    with pytest.raises(ValueError, match=r"report.json' holds NaN or an infinite number"):
        pushed(checkpoint)


def test_nothing_private_is_in_any_file(checkpoint: Path) -> None:
    sidecar = json.loads((checkpoint / "medusa_heads.json").read_text())
    target = sidecar["target"] | {"cache_dir": "/home/alice", "note": "acme-merger"}
    change(checkpoint / "medusa_heads.json", provenance=STORY, target=target)
    change(checkpoint / "config.json", _name_or_path="/home/alice", note="acme-merger")
    write_report(checkpoint, by_hand())
    change(checkpoint / "report.json", argv=STORY["argv"], target="/home/alice/t", log=TOKEN)
    benchmark = {
        "settings": [],
        "machine": {"cpu": "Abacus", "cores": 2, "torch": "2", "transformers": "5"},
        "checkpoint": "acme-merger",
        "draft_models": ["/home/alice/draft"],
        "corpus": "data/customer.jsonl",
        "argv": STORY["argv"],
    }
    (checkpoint / "report.md").write_text(f"# Of /home/alice/t\n\nRun with {TOKEN} {W_AND_B}\n")
    (checkpoint / "benchmark.json").write_text(json.dumps(benchmark | {"settings": []}))
    with pytest.raises(ValueError, match="the report beside the heads is damaged"):
        pushed(checkpoint)  # one of no settings
    (checkpoint / "benchmark.json").unlink()
    files = pushed(checkpoint)
    for name, content in files.items():
        for private in PRIVATE:
            assert private.encode() not in content, (name, private)
    assert json.loads(files["medusa_heads.json"])["provenance"] == TOLD
    assert files["report.md"] == b"# Of t\n\nRun with *** ***\n"
    assert b"data: `trl-lib/Capybara`, local data, `stdlib`" in files["README.md"]


@pytest.mark.parametrize("name", ["report.json", "speed.txt", "speed"])
def test_a_benchmark_is_cleaned_whatever_its_file_is_called(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    method = {"name": "heads", "identical": 1.0}
    method |= dict.fromkeys(("tokens_per_second", "speedup", "tokens_per_step"), 2.0)
    setting = {"name": "greedy", "dtype": "float32", "prompts": 1, "new_tokens": 4}
    report = {
        "settings": [setting | {"methods": [method]}],
        "machine": {"cpu": "Abacus", "cores": 2, "torch": "2", "transformers": "5"},
        "checkpoint": "/home/alice/acme-merger",
    }
    (tmp_path / name).write_text(json.dumps(report))
    files = pushed(checkpoint, benchmark=tmp_path / name)
    assert b"alice/acme-merger" not in files["benchmark.json"]
    assert b"Measured on 2 cores of Abacus" in files["README.md"]


def test_a_card_that_shows_a_secret_is_refused(checkpoint: Path) -> None:
    card = checkpoint / "README.md"
    card.write_text(f"---\nlicense: mit\n---\nMine, at revision `{W_AND_B}`: a token is a word.\n")
    assert pushed(checkpoint)["README.md"] == card.read_bytes()
    for secret in (TOKEN, f"Bearer {TOKEN}", "https://me:hunter2@host/x", f"WANDB {W_AND_B}"):
        card.write_text(f"Mine. {secret}\n")
        with pytest.raises(ValueError, match="shows what looks like a token or key") as raised:
            pushed(checkpoint)
        assert secret not in str(raised.value)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from([*PRIVATE, f"--password=hunter2 {TOKEN}", f'{{"a": "{TOKEN}"}}']),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*STORY, *PRIVATE, "dataset", "token", "Ünï"]), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*STORY, "converted_from"]), anything))
def test_whatever_stands_there(story: dict[str, Any]) -> None:
    told = published_story(story)
    text = json.dumps(told)
    for private in set(PRIVATE) - {"acme-merger", "customer.jsonl", "hunter2", W_AND_B}:
        assert private not in text  # the others are words, which a setting may be
    assert published_story(told) == told
