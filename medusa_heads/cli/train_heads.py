"""The command `train-heads`.

train-heads --config configs/demo.yaml --output_dir runs/demo/heads
train-heads --model_name_or_path Qwen/Qwen2.5-0.5B --dataset corpus.jsonl --self_distill
train-heads --mtp --model_name_or_path my-finetune --mtp_from Qwen/Qwen3.5-2B --dataset a.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.flags.arguments import arguments_of, command
from medusa_heads.cli.training import Command
from medusa_heads.config import HeadsConfig
from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.settings import flag, flag_name
from medusa_heads.shared_flags import MatrixFlag
from medusa_heads.tables import on_screen
from medusa_heads.training.arguments.batch import fit_batch
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.layer import LayerArguments
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.mtp import MTP_LEARNING_RATE, MtpArguments
from medusa_heads.training.arguments.recipe import RECIPES, RecipeArguments
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.arguments.vocabulary import VocabularyArguments
from medusa_heads.training.hidden.launched import Sharding, launched_sharding, sharding_of

if TYPE_CHECKING:
    from medusa_heads.target.target import TargetModel
    from medusa_heads.training.data.prepare import TrainingData
    from medusa_heads.training.runs.dry_run import DryRun, TextSize


@dataclass
class CheckpointArguments(MatrixFlag):
    """What else is made and saved with the heads."""

    joint: bool = flag(
        False,
        "Train an adapter of the target together with the heads. It becomes another model: heads "
        "and adapter are saved, and loaded, together.",
    )


def train(
    to_target: TargetArguments,
    to_data: DataArguments,
    recipe: RecipeArguments,
    config: HeadsConfig,
    to_draft: VocabularyArguments,
    to_shape: LayerArguments,
    objective: LossConfig,
    to_distill: DistillArguments,
    to_cache: CacheArguments,
    to_save: CheckpointArguments,
    to_join: JointConfig,
    to_mtp: MtpArguments,
    to_optimise: OptimisationArguments,
) -> None:
    """Train extra decoding heads for a frozen causal language model."""
    joint = joint_settings(to_save.joint, to_join)
    if to_mtp.mtp:
        refuse_beside_modules(to_target, recipe, config, to_draft, to_shape, to_cache, to_save)
        _train_modules(Command(to_target, to_data, to_distill, to_optimise), to_mtp, objective)
        return
    config, word = to_draft.number(config), to_draft.word()
    to_shape.check(config)
    if to_save.with_vocab_matrix:
        from medusa_heads.checkpoint.stored_heads import check_takes_matrix

        check_takes_matrix(to_shape.reading(config, lambda: 5))  # features of whatever target
    sharding = spread_of(to_target, to_distill)
    if joint is not None and sharding is not None:
        sharding.check_joint()
    if joint is not None and to_target.device_map is not None:
        raise ValueError("an adapter learns on one device: leave device_map or joint out")
    to_cache.check(joint=joint is not None, streaming=to_data.streaming)
    # Of which an adapter would learn another text than the target's own.
    command = Command(to_target, to_data, to_distill, to_optimise, learns_prompts=joint is None)
    args = to_training_arguments(to_optimise, config.vocab_matrix, autocast=command.autocast)

    from medusa_heads.target.features import count_layers
    from medusa_heads.training.data.draft_vocabulary import choose_vocabulary
    from medusa_heads.training.hidden.cache_setup import cheaper
    from medusa_heads.training.runs.dry_run import plan_heads
    from medusa_heads.training.runs.heads import train_heads, trainer_of
    from medusa_heads.training.runs.record import steps_before

    trainer_of(joint).check_arguments(args)
    four_bits, matrix = to_target.load_in_4bit, to_save.with_vocab_matrix
    spread = args.world_size if sharding is not None else 1
    # Most steps come behind the warm-up, in which the target needs no gradients.
    steady = None if joint is None else replace(joint, warmup_steps=0)
    told: dict[str, Any] = {"objective": objective, "hidden_cache": to_cache, "joint": joint}
    planned = config

    def shaped(target: TargetModel) -> HeadsConfig:
        return to_shape.shaped(reading(target), target.hidden_size)

    def reading(target: TargetModel) -> HeadsConfig:
        return to_shape.reading(config, lambda: count_layers(target.model))

    def plan(target: TargetModel, data: TrainingData, size: TextSize) -> DryRun:
        nonlocal planned
        drafted = choose_vocabulary(data, target.vocab_size, config, word, whole_matrix=matrix)
        planned = replace(shaped(target), draft_vocab_size=drafted.size)
        if joint is None:
            learnt_of_row = (size.learnt or 0) / (size.rows or 1)
            fit_batch(args, size.rows, learnt_of_row, steps_before(command.checkpoint))
        return plan_heads(
            target, planned, args, size, four_bits=four_bits, joint=joint, spread=spread
        )

    def check(target: TargetModel) -> None:
        target.with_features(reading(target).features)
        shaped(target).for_target(target.hidden_size, target.vocab_size)

    def learn(target: TargetModel, data: TrainingData, **settings: Any) -> object:
        settings |= {"config": shaped(target), "draft_vocab": word, "with_vocab_matrix": matrix}
        return train_heads(target, data, **told, **settings)

    def rehearse(*given: Any, **settings: Any) -> object:
        settings |= {"config": planned, "draft_vocab": "all"}
        return train_heads(*given, objective=objective, joint=steady, **settings)

    command.run(
        args,
        config.num_heads,
        plan=plan,
        check=check,
        train=learn,
        rehearse=rehearse,
        report=_report,
        sharding=sharding,
        compare=None
        if joint
        else lambda target, data: cheaper(to_cache, target, data, reading(target), args),
    )


def spread_of(to_target: TargetArguments, to_distill: DistillArguments) -> Sharding | None:
    """How the target is spread over the processes, None where it is not; ValueError where it then
    cannot write text."""
    sharding = sharding_of(to_target)
    if sharding is not None and to_distill.self_distill:
        raise ValueError(
            "processes that share a target (shard_target, tensor_parallel, or an FSDP launch) "
            "cannot write text apart: make it with medusa-heads regenerate, and give it as "
            "--dataset"
        )
    return sharding


def joint_settings(joint: bool, config: JointConfig) -> JointConfig | None:
    """The configuration of joint training where that is asked for."""
    if not joint and config != JointConfig():
        idle = [
            flag_name(part)
            for part in fields(config)
            if getattr(config, part.name) != getattr(JointConfig(), part.name)
        ]
        raise ValueError(f"{idle[0]} plays a part in joint training only: add --joint")
    return config if joint else None


def refuse_beside_modules(to_target: TargetArguments, *of_heads: Any) -> None:
    """Raises ValueError where a flag of new heads, or of a target that is not whole in its own
    dtype, stands beside --mtp."""
    if launched_sharding() is not None:
        raise ValueError(
            "modules learn beside a whole target in each process: launch several with "
            "configs/accelerate/ddp.yaml"
        )
    of_target = ("device_map", "shard_target", "tensor_parallel", "load_in_4bit")
    parts = (*of_heads, to_target)
    for part, each in ((of, each) for of in parts for each in fields(of)):
        judged = part is not to_target or each.name in of_target
        if judged and getattr(part, each.name) != each.default:
            raise ValueError(
                f"--mtp trains the target's own modules, whose shape is given, beside the whole "
                f"target in its own dtype: leave {flag_name(each)} out"
            )


def _train_modules(command: Command, to_mtp: MtpArguments, objective: LossConfig) -> None:
    from medusa_heads.training.runs.dry_run import plan_modules
    from medusa_heads.training.runs.mtp import MtpTrainer, begin_modules, train_mtp

    args = to_training_arguments(
        command.to_optimise, "shared", rate=MTP_LEARNING_RATE, autocast=command.autocast
    )
    MtpTrainer.check_arguments(args)
    depth = to_mtp.mtp_depth
    command.run(
        args,
        depth or 1,
        plan=lambda target, _data, size: plan_modules(target, depth, args, size),
        check=lambda target: begin_modules(target, to_mtp),  # small beside the target
        train=partial(train_mtp, mtp=to_mtp, objective=objective),
        begins_as=to_mtp.mtp_from,
        report=_report_modules,
    )


def _report_modules(folder: Path) -> None:
    """What was learnt, beside what the modules knew before, and where they lie."""
    from rich.console import Console

    from medusa_heads.checkpoint.mtp_checkpoint import read_mtp_sidecar

    now = read_mtp_sidecar(folder)["measured"]
    before = now["before"]
    pairs = enumerate(zip(before["top1"], now["top1"], strict=True), start=2)
    cells = [[f"top-1 of token t + {ahead}", *(f"{x:.3f}" for x in pair)] for ahead, pair in pairs]
    for name in ("loss", "tokens_per_step"):
        cells.append([name.replace("_", " "), f"{before[name]:.3f}", f"{now[name]:.3f}"])
    title = "The target's modules on held-out text (chains, simulated)"
    Console().print(on_screen(title, (["", "before", "now"], cells)))
    print(f"Modules: {folder}")


def _report(folder: Path) -> None:
    """What was learnt: accuracy of each head, the trees that implies, and where it all lies."""
    from rich.console import Console

    from medusa_heads.training.measure.metrics import target_line
    from medusa_heads.training.measure.report import LEGEND, headline, read_report, tables

    report = read_report(folder)
    Console(highlight=False).print(*tables(report), f"[dim]{LEGEND}", headline(report), sep="\n")
    if (own := report["held_out"].get("target")) is not None:
        print(target_line(own))
    print(f"Checkpoint: {folder}")


ARGUMENTS = arguments_of(train)
main = command("train-heads", train, train.__doc__, presets={"recipe": RECIPES})

if __name__ == "__main__":  # accelerate launch -m medusa_heads.cli.train_heads
    raise SystemExit(main())
