"""Heads by a word: what it stands for, and a run that says no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.cli.train_heads import ARGUMENTS, main
from medusa_heads.cli.verbs.prepare_hidden import main as prepare_hidden
from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.layer import LayerArguments
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.recipe import RECIPES
from tests.conftest import TinyLlama

WORDS = 50


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_stands_for_flags_that_exist(recipe: str) -> None:
    argv = ["--recipe", recipe, "--num_heads", "7"]
    told: dict[str, Any] = {"prog": "train-heads", "description": ""}
    needed = ["--model_name_or_path", "x", "--dataset", "stdlib"]
    read = parse_arguments(ARGUMENTS, argv + needed, presets={"recipe": RECIPES}, **told)
    (config,) = (each for each in read if isinstance(each, HeadsConfig))
    (layer,) = (each for each in read if isinstance(each, LayerArguments))
    (objective,) = (each for each in read if isinstance(each, LossConfig))
    of_heads = {**RECIPES[recipe], "num_heads": 7}
    assert objective == LossConfig(of_heads.pop("loss", "cross_entropy"))
    assert layer == LayerArguments(usual_features=of_heads.pop("usual_features", False))
    assert config == HeadsConfig(**of_heads)


def test_heads_to_be_served_read_three_layers(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"text": " ".join(f"w{(3 * i + j) % WORDS}" for j in range(32))} for i in range(24)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def flags(layers: int, run: str, *more: str) -> list[str]:
        folder = tmp_path / f"target-{layers}"
        if not folder.exists():
            tiny_llama(vocab_size=WORDS, num_hidden_layers=layers).save_pretrained(folder)
            words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
            words.pre_tokenizer = pre_tokenizers.Whitespace()
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
            tokenizer.save_pretrained(folder)
        given = ["--model_name_or_path", str(folder), "--dataset", str(corpus), "--max_steps", "2"]
        given += ["--output_dir", str(tmp_path / run), "--max_length", "32", "--recipe", "served"]
        return [*given, "--training_args", '{"use_cpu": true, "disable_tqdm": true}', *more]

    assert main(flags(4, "few")) == 2
    assert "usual_features are three layers of five or more" in capsys.readouterr().err
    given = flags(6, "run", "--correction_rank", "4")
    assert main(given) == 0
    loaded = load_heads(tmp_path / "run", TargetModel.from_pretrained(str(tmp_path / "target-6")))
    config = loaded.heads.config
    assert (config.kind, config.features, config.correction_rank) == ("block", (1, 3, 4), 4)

    states = ["--hidden_cache_dir", str(tmp_path / "states")]
    assert prepare_hidden([*given, *states]) == 0
    read = [*given, *states, "--hidden_cache", "read", "--overwrite_output_dir"]
    assert main(read) == 0
    assert main([*read, "--features", "0", "2", "4"]) == 2  # of which nothing was prepared
    capsys.readouterr()
    nobody = ["--model_name_or_path", "nowhere", "--dataset", "stdlib", "--norm_output"]
    assert prepare_hidden([*nobody, *states]) == main(nobody) == 2
    assert capsys.readouterr().err.count("norm_output is said of an eagle3 layer") == 2
