"""The commands that are killed: what each is given, and what of it is within a write.

All work in the folder they are started in, on a random target of two layers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

PIECES = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]
WORDS = "the tree of drafts is read in one pass and what fits is kept while all else is forgotten"
_TRAINED = (
    "--dataset {given}/texts.jsonl --max_length 48 --max_steps 8 --per_device_train_batch_size 4 "
    "--eval_rows 6 --save_steps 2 --logging_steps 1 --bf16 false --resume_from_checkpoint auto "
    '--training_args {{"use_cpu":true}}'
)
_OF_TARGET = "--model_name_or_path {given}/target"
_WITHIN = re.compile(r"\.part|checkpoint-|answers-|POST|PUT")
_ANY = r"os\.|open |shutil\."


@dataclass(frozen=True)
class Command:
    """A command to be killed.

    Attributes:
        name: in the record.
        main: module of the command's `main`.
        flags: what it is given; `{given}` is the folder of fixtures.
        phases: name of a kind of write, and what its events look like.
        share: how many chains of kills it gets, in proportion.
        kills: most kills before it may come to its end.
        before: copies of fixtures that stand in its folder when it begins.
        once: where its result stands it refuses to run.
        hub: it speaks to a hub.
        published: what its repository holds before.
        smaller: sizes of modules that are less here, so that there is more to be killed in.
    """

    name: str
    main: str
    flags: str
    phases: dict[str, str]
    share: int = 1
    kills: int = 1
    before: dict[str, str] = field(default_factory=dict)
    once: bool = False
    hub: bool = False
    published: str | None = None
    smaller: dict[str, int] = field(default_factory=dict)

    def begin(self, folder: Path, given: Path) -> None:
        """Make the folder as the command first finds it."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, fixture in self.before.items():
            shutil.copytree(given / fixture, folder / name)

    def phase_of(self, event: str) -> str | None:
        """Within which kind of write an event lies; making a folder for what comes is none."""
        if not _WITHIN.search(event):
            return None
        return next((name for name, like in self.phases.items() if re.search(like, event)), None)

    def work(self, given: Path) -> Callable[[], int]:
        """The command itself, to be run in a process of its own."""
        main: Callable[[list[str]], int] = import_module(self.main).main
        argv = [part.format(given=given) for part in self.flags.split()]

        def run() -> int:
            for name, size in self.smaller.items():
                module, _, constant = name.rpartition(".")
                setattr(import_module(module), constant, size)
            return main(argv)

        return run


CHECKPOINT = {"checkpoint": r"checkpoint-\d+"}
COMMANDS = (
    Command(
        "train-heads",
        "medusa_heads.cli.train_heads",
        f"{_OF_TARGET} --output_dir run --num_heads 2 --hidden_cache auto "
        f"--save_total_limit 9 {_TRAINED}",
        CHECKPOINT | {"hidden cache": r"hidden_states/", "heads": r"run/"},
        share=3,
        kills=4,
    ),
    Command(
        "prepare-hidden",
        "medusa_heads.cli.verbs.prepare_hidden",
        f"{_OF_TARGET} --hidden_cache_dir hidden_states --num_heads 2 {_TRAINED}",
        {"hidden cache": r"hidden_states/"},
        kills=4,
        smaller={"medusa_heads.training.hidden.prepare.SHARD_BYTES": 1 << 14},
    ),
    Command(
        "train-heads --joint",
        "medusa_heads.cli.train_heads",
        f"{_OF_TARGET} --output_dir run --num_heads 2 --joint true --lora_r 2 {_TRAINED}",
        CHECKPOINT | {"heads and adapter": r"run/"},
        kills=3,
    ),
    Command(
        "train-draft",
        "medusa_heads.cli.train_draft",
        f"{_OF_TARGET} --output_dir run --draft_layers 1 --on_policy_share 0.5 "
        f"--on_policy_refresh 4 {_TRAINED}",
        CHECKPOINT | {"draft model": r"run/"},
        share=2,
        kills=3,
    ),
    Command(
        "regenerate",
        "medusa_heads.cli.verbs.regenerate",
        "{given}/target --output_dir rows --dataset {given}/prompts.jsonl --max_new_tokens 4 "
        "--batch_size 16 --dtype float32",
        {"answers": r"answers/", "dataset": r"rows/"},
        share=3,
        kills=2,
    ),
    Command(
        "calibrate",
        "medusa_heads.cli.verbs.calibrate",
        "heads --dataset {given}/texts.jsonl --target {given}/target --max_length 48 "
        "--max_positions 200",
        {"statistics": r"heads/"},
        before={"heads": "heads"},
    ),
    Command(
        "convert",
        "medusa_heads.cli.verbs.convert",
        "{given}/foreign out --target {given}/target",
        {"heads": _ANY},
        once=True,
    ),
    Command(
        "export",
        "medusa_heads.cli.verbs.export",
        "{given}/heads out --to vllm --target {given}/target",
        {"exported heads": _ANY},
        once=True,
    ),
    Command(
        "push",
        "medusa_heads.cli.verbs.push",
        "{given}/heads alice/heads --base_model alice/target",
        {"push": r"POST .*/(preupload|commit|batch)|PUT "},
        hub=True,
        published="other-heads",
    ),
    Command(
        "pull",
        "medusa_heads.cli.verbs.pull",
        "alice/heads heads",
        {"pulled heads": r"heads|\.copying"},
        once=True,
        hub=True,
        published="heads",
    ),
    Command(
        "pull --overwrite",
        "medusa_heads.cli.verbs.pull",
        "alice/heads heads --overwrite",
        {"pulled heads": r"heads|\.copying"},
        before={"heads": "other-heads"},
        hub=True,
        published="heads",
    ),
    Command(
        "env",
        "medusa_heads.cli.verbs.env",
        "{given}/target",
        {"measurement": r"cache/"},
    ),
    Command(
        "generate --corpus",
        "medusa_heads.cli.verbs.generate",
        "{given}/heads --target {given}/target --prompt tree --max_new_tokens 4 "
        "--corpus {given}/texts.jsonl --dtype float32",
        {"corpus index": r"cache/corpora", "measurement": r"cache/"},
    ),
)


def make_given(folder: Path) -> None:
    """Write the fixtures: a target, texts, prompts, heads, and heads of another make."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
    from medusa_heads.checkpoint.checkpoint import save_heads
    from medusa_heads.trees.statistics import HeadStatistics

    folder.mkdir(parents=True)
    pieces = {piece: i for i, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder / "target")
    target = TargetModel.from_pretrained(str(folder / "target"))
    ranks_SK = torch.randint(12, (200, 2), generator=torch.Generator().manual_seed(0))
    for number, name in enumerate(("heads", "other-heads")):
        heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
        with torch.no_grad():
            for tensor in heads.parameters():
                tensor.add_(0.01 * (number + 1))
        save_heads(
            folder / name,
            heads,
            target,
            statistics=HeadStatistics.from_ranks(ranks_SK // (number + 1)),
        )
    (folder / "foreign").mkdir()
    tensors = {}
    for i in range(2):
        tensors[f"{i}.0.linear.weight"] = torch.randn(32, 32)
        tensors[f"{i}.0.linear.bias"] = torch.randn(32)
        tensors[f"{i}.1.weight"] = torch.randn(len(pieces), 32)
    torch.save(tensors, folder / "foreign" / "medusa_lm_head.pt")
    said = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "a/target"}
    (folder / "foreign" / "config.json").write_text(json.dumps(said))
    words = WORDS.split()
    texts = [" ".join(words[k:] + words[:k]) * (1 + k % 2) for k in range(len(words))]
    _lines(folder / "texts.jsonl", [{"text": text} for text in texts * 2])
    prompts = [{"prompt": " ".join(words[k % 17 : k % 17 + 3]) + str(k)} for k in range(160)]
    _lines(folder / "prompts.jsonl", prompts)


def _lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
