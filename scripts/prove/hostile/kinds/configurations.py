"""YAML configurations and flags."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from typing import Any

from scripts.prove.hostile.attempt import Attempt
from scripts.prove.hostile.commands import command
from scripts.prove.hostile.kinds.yaml_texts import as_yaml, no_yaml
from scripts.prove.hostile.values import HUGE, NOT_NUMBERS, deep, draw, many_digits, mutated, words
from scripts.prove.hostile.workshop import Place, Workshop

FILE = "settings.yaml"
WHOLE = {"max_steps", "num_heads", "num_layers", "max_length", "seed", "shuffle_buffer", "lora_r"}
COUNTS = sorted(WHOLE - {"seed"} | {
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "save_total_limit", "early_stopping_patience", "eval_rows", "dataset_num_proc",
    "draft_vocab_size",
})  # fmt: skip
FRACTIONS = (
    "learning_rate", "num_train_epochs", "eval_steps", "save_steps", "weight_decay", "warmup_share",
    "logging_steps", "loss_temperature", "head_loss_decay", "head_weight_smoothing", "eval_share",
    "lora_alpha", "lora_dropout", "lora_learning_rate", "joint_warmup_steps", "joint_lm_weight",
    "joint_kl_weight",
)  # fmt: skip
SWITCHES = ("packing", "streaming", "joint", "prefix_attention", "bf16", "load_in_4bit")
WORDS = ("kind", "vocab_matrix", "on_bad_row", "metric_for_best_model", "head_weights", "dtype")
OUTSIDE_A_SHARE = ("nan", ".nan", ".inf", "-.inf", "-1", "-0.5")
FLAGS_OF_GENERATE: dict[str, tuple[str, ...]] = {
    "temperature": ("nan", "inf", "-1", "0", "x", ""),
    "top_p": ("nan", "inf", "-1", "0", "1.5", "x"),
    "typical_p": ("nan", "-1", "0", "2", "x"),
    "min_p": ("nan", "-1", "2", "x"),
    "top_k": ("-1", "1.5", "x", "nan"),
    "repetition_penalty": ("nan", "-1", "0", "x", "-inf"),
    "no_repeat_ngram_size": ("-1", "x", "1.5"),
    "max_new_tokens": ("-1", "0", "x", "1.5", "1" * 30, "999999"),
    "seed": ("x", "1.5", "1" * 40),
    "tree": ("", "x", "-1", "0", "dynamic:", "dynamic:x", "static:-1", "cartesian:",
        "cartesian:0,1",
             "none.json", "../none.json", "auto+", "+suffix", "\N{SUPERSCRIPT TWO}", "9" * 30,
             "9" * 5000),
    "drafter": ("", "x", "early_exit:", "early_exit:x", "early_exit:-1", "early_exit:0",
        "early_exit:999", "recycling:0", "recycling:x"),
    "acceptance": ("", "x", "Lossless"),
    "epsilon": ("0.5", "x", "nan"),
    "threshold": ("0.5", "x", "nan"),
    "dtype": ("int8", "x", "float128", "__class__", ""),
    "device": ("", "x", "cpu:x", "cuda:99", "meta:-1", "\N{SNOWMAN}"),
    "target": ("", "./none", "/none", "a/b/c", "..", "x" * 300, "\0"),
    "corpus": ("", "./none.txt", "/none", "\0"),
    "stop": ("",),
    "heads": ("x",),
    "temprature": ("1",),
}  # fmt: skip


class Configurations:
    """Given to `train-heads --dry_run`, `train-draft --dry_run` and to `medusa-heads generate`."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._corpus = workshop.root / "own" / "words.jsonl"
        rng = random.Random(0)
        rows = [json.dumps({"text": words(rng, 30, 40)}) for _ in range(6)]
        self._corpus.write_text("\n".join(rows) + "\n")

    def draw(self, rng: random.Random, place: Place) -> Attempt:
        """One configuration file, or one command line."""
        makes: list[tuple[float, Callable[[random.Random, Place], Attempt]]] = [
            (10, self._sound), (20, self._value), (18, self._yaml), (10, self._keys),
            (17, self._flags), (15, self._generate), (10, self._mutated),
        ]  # fmt: skip
        return draw(rng, makes)(rng, place)

    def _settings(self, place: Place) -> dict[str, Any]:
        return {
            "model_name_or_path": str(self._workshop.target_folder),
            "dataset": [str(self._corpus)],
            "output_dir": str(place.out),
            "max_length": 64,
            "dry_run": True,
            "measure_steps": False,
            "training_args": {"use_cpu": True},
        }

    def _given(self, place: Place, text: str | bytes, verb: str = "train-heads") -> list[str]:
        path = place.inputs / FILE
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return ["--config", str(path)]

    def _sound(self, rng: random.Random, place: Place) -> Attempt:
        settings = self._settings(place) | rng.choice(
            [
                {"num_heads": rng.randint(1, 5), "num_layers": 1},
                {"learning_rate": "1e-4", "warmup_share": 0},
                {"loss": {"cross_entropy": 1, "reverse_kl": 0.5}},
                {"packing": True, "seed": rng.randrange(2**31)},
                {"vocab_matrix": "own", "dataset": str(self._corpus)},
                {"max-steps": rng.randint(1, 99), "eval-rows": 2},
            ]
        )
        text = json.dumps(settings) if rng.random() < 0.5 else as_yaml(settings)
        return Attempt("good", "good", command("train-heads", self._given(place, text)))

    def _value(self, rng: random.Random, place: Place) -> Attempt:
        """A number, switch or word that is none, or is out of its range."""
        kind = rng.choice(["count", "fraction", "switch", "word", "name"])
        value: Any
        if kind == "count":
            key = rng.choice(COUNTS)
            value = rng.choice([-1 - rng.randrange(9), 0, 2.5, ".nan", ".inf", *NOT_NUMBERS[:6]])
            if key == "max_steps" and value == -1:
                value = -2
        elif kind == "fraction":
            key = rng.choice(FRACTIONS)
            value = rng.choice(
                [*OUTSIDE_A_SHARE, "many", [], {"a": 1}, HUGE, "1e", -rng.random() - 0.1]
            )
            if key in ("logging_steps",) and value == HUGE:
                value = "many"
        elif kind == "switch":
            key, value = rng.choice(SWITCHES), rng.choice([5, "maybe", [], {}, 0.5, words(rng)])
        elif kind == "word":
            key = rng.choice(WORDS)
            value = rng.choice([5, "", words(rng), [], {}, True, "__class__"])
        else:
            key = rng.choice(["output_dir", "model_name_or_path", "dataset_split", "chat_template"])
            value = rng.choice([[], {"a": "b"}])  # a number is a text as well: a folder called 5
        extra = {"joint": True} if key.startswith(("lora", "joint")) and key != "joint" else {}
        settings = {**self._settings(place), **extra, key: value}
        # NaN and infinity are YAML's own words, not texts.
        bare = value if isinstance(value, str) and value.lstrip("-").startswith(".") else None
        text = as_yaml({k: v for k, v in settings.items() if k != key})
        text += f"{key}: {bare if bare is not None else json.dumps(value)}\n"
        label = f"{key}: {str(value)[:20]}"
        names = (key, key.partition("_")[2] or key)
        return Attempt(label, "bad", command("train-heads", self._given(place, text)), names)

    def _yaml(self, rng: random.Random, place: Place) -> Attempt:
        """What YAML itself can do to a reader."""
        key = rng.choice(["learning_rate", "training_args", "dataset", "loss", "unheard_of"])
        label, text = no_yaml(rng, as_yaml(self._settings(place)), key, place.marker)
        run = command("train-heads", self._given(place, text))
        return Attempt(f"yaml: {label}", "bad", run, (FILE, key))

    def _keys(self, rng: random.Random, place: Place) -> Attempt:
        """Names that no command knows, and files that are none."""
        base = self._settings(place)
        names: tuple[str, ...]
        case = rng.randrange(6)
        if case == 0:
            key = rng.choice(
                ["learning_rat", "lr", "__class__", "", "epochs", "5", "adam_beta1", "x" * 99]
            )
            text, names = as_yaml(base) + f"{json.dumps(key)}: 1\n", (FILE,)
        elif case == 1:
            inner = rng.choice(["push_to_hub", "hub_token", "learning_rate", "unheard_of", ""])
            text, names = as_yaml(base | {"training_args": {inner: 1}}), ("training_args",)
        elif case == 2:
            term = rng.choice(
                [{"x": 1}, {"cross_entropy": -1}, {"cross_entropy": HUGE}, {"mse": "a"}, {}]
            )
            text, names = as_yaml(base) + f"loss: {json.dumps(term)}\n", ("loss", FILE)
        elif case == 3:
            broken = rng.choice(
                ["../none", "./none.jsonl", "/none/at/all", "a,,./b", "", "[", "~none/x"]
            )
            text, names = as_yaml(base | {"dataset": broken}), ("corpus", "dataset", broken or FILE)
        elif case == 4:
            broken = rng.choice(["./none", "/none", "", "a/b/c", "..", "\0", str(self._corpus)])
            text = as_yaml(base | {"model_name_or_path": broken})
            names = ("model", FILE, "null character")
        else:
            missing = rng.choice(["model_name_or_path", "dataset"])
            text = as_yaml({k: v for k, v in base.items() if k != missing})
            names = (missing,)
        return Attempt(
            f"keys {case}", "bad", command("train-heads", self._given(place, text)), names
        )

    def _flags(self, rng: random.Random, place: Place) -> Attempt:
        """The same mistakes on the command line."""
        path = place.inputs / FILE
        path.write_text(as_yaml(self._settings(place)))
        flag, value = rng.choice(
            [
                ("training_args",
                    rng.choice([deep(9000), deep(9000, "{"), "[1]", "5", "{", '{"x": NaN}',
                        many_digits(rng)])),
                ("loss",
                    rng.choice(["", "x", "mse=", "mse=nan", "mse=x,mse=1", "{", deep(9000, "{"),
                        "mse=-1", f'{{"mse": {many_digits(rng)}}}', "mse=inf"])),
                ("chat_template_kwargs",
                    rng.choice(["[1]", "{", "5", deep(9000), many_digits(rng)])),
                ("chat_template", rng.choice(["", "./none", str(place.inputs), "\0", "x" * 300])),
                ("unheard_of", rng.choice([words(rng), deep(9000), many_digits(rng), "-1"])),
                (rng.choice(COUNTS), rng.choice(["x", "1.5", "nan", "-9", "", "1" * 5000])),
                (rng.choice(FRACTIONS), rng.choice(["x", "nan", "-9", "", "inf", "1e", "0x1"])),
                (rng.choice(SWITCHES), rng.choice(["x", "5", "maybe"])),
                ("config", rng.choice(["./none", str(place.inputs), "", "\0", "x" * 300])),
                ("report_to", rng.choice(["x", "wandb,x", "os.system"])),
                ("lr_scheduler_type", rng.choice(["x", "__class__", ""])),
                ("dtype", rng.choice(["int8", "x", "", "__class__"])),
            ]
        )  # fmt: skip
        argv = ["--config", str(path), f"--{flag}", value]
        if flag.startswith(("lora", "joint")) and flag != "joint":
            argv += ["--joint"]
        label = f"--{flag} {value[:20]!r}"
        return Attempt(
            label,
            "bad",
            command("train-heads", argv),
            (
                flag,
                flag.replace("_", "-"),
                flag.partition("_")[2] or flag,
                "YAML",
                value[:40] or flag,
            ),
        )

    def _generate(self, rng: random.Random, place: Place) -> Attempt:
        """Flags of a command that decodes."""
        heads = str(self._workshop.heads())
        start = [
            heads,
            "--target",
            str(self._workshop.target_folder),
            "--device",
            "cpu",
            "--max_new_tokens",
            "4",
        ]
        if rng.random() < 0.1:
            argv = [*start, "--prompt", words(rng), "--tree", rng.choice(["none", "chain", "4"])]
            return Attempt("good flags of generate", "good", command("generate", argv))
        flag = rng.choice(sorted(FLAGS_OF_GENERATE))
        value = rng.choice(FLAGS_OF_GENERATE[flag])
        argv = [*start, "--prompt", "x", f"--{flag}={value}"]
        label = f"generate --{flag}={value[:20]!r}"
        names = (
            flag,
            *flag.split("_"),
            # As sentences write it: a null character as Python does.
            repr(os.path.normpath(value))[1:41] if value else "language model",
        )
        return Attempt(label, "bad", command("generate", argv), names)

    def _mutated(self, rng: random.Random, place: Place) -> Attempt:
        """A good file with some bytes changed: refused, or it says what a safe reader reads."""
        text = as_yaml(self._settings(place) | {"num_heads": 3, "warmup_share": 0.1})
        data = mutated(text.encode(), rng)
        if b"dry_run: true" not in data:  # what is tried here must not begin to train
            data = text.encode() + b"warmup_share : 0\n"
        return Attempt("bytes", "either", command("train-heads", self._given(place, data)))
