"""Write the target's hidden states that a run of train-heads would read, of the same flags.

medusa-heads prepare-hidden --config configs/demo.yaml --hidden_cache_dir states
train-heads --config configs/demo.yaml --hidden_cache read --hidden_cache_dir states
accelerate launch -m medusa_heads.cli.verbs.prepare_hidden --config configs/llama-3.1-8b.yaml
medusa-heads prepare-hidden --config configs/llama-3.1-8b.yaml --backend vllm
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.planning import planned_text
from medusa_heads.cli.train_heads import CheckpointArguments, joint_settings, spread_of
from medusa_heads.cli.training import Command
from medusa_heads.config import HeadsConfig
from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.interop.vllm_engine import import_vllm
from medusa_heads.settings import mapping
from medusa_heads.training.arguments.batch import fit_batch
from medusa_heads.training.arguments.cache import CacheArguments, ExtractionArguments
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.layer import LayerArguments
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.mtp import MtpArguments
from medusa_heads.training.arguments.recipe import RECIPES, RecipeArguments
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.arguments.vocabulary import VocabularyArguments


def prepare_hidden(
    to_target: TargetArguments,
    to_data: DataArguments,
    _recipe: RecipeArguments,
    config: HeadsConfig,
    _to_draft: VocabularyArguments,
    to_shape: LayerArguments,
    _objective: LossConfig,
    to_distill: DistillArguments,
    to_cache: CacheArguments,
    to_save: CheckpointArguments,
    to_join: JointConfig,
    to_mtp: MtpArguments,
    to_optimise: OptimisationArguments,
    to_extract: ExtractionArguments,
) -> None:
    """Load the target, prepare the text, say what a cache is worth, and write it. Of a dry run the
    sentence alone."""
    if to_mtp.mtp:
        raise ValueError("modules (--mtp) read no hidden states from disk: leave mtp out")
    joint = joint_settings(to_save.joint, to_join)
    to_cache = replace(to_cache, hidden_cache="auto")
    to_cache.check(joint=joint is not None, streaming=to_data.streaming)
    to_shape.check(config)
    by_vllm = to_extract.backend == "vllm"
    to_extract.check(to_target, self_distill=to_distill.self_distill)
    if by_vllm:  # asked for before the target is loaded and text prepared
        import_vllm()
    sharding = spread_of(to_target, to_distill)
    told = Command(to_target, to_data, to_distill, to_optimise, trains=False, learns_prompts=True)
    args = to_training_arguments(to_optimise, config.vocab_matrix)

    from medusa_heads.target.features import count_layers
    from medusa_heads.training.hidden.cache_setup import cheaper, parts_of
    from medusa_heads.training.hidden.extracted import extracting, load_on_host
    from medusa_heads.training.hidden.prepare import Forwards, write_parts
    from medusa_heads.training.hidden.sharding import digest_for_all
    from medusa_heads.training.runs.setup import as_target

    if by_vllm:
        plain = load_on_host(to_target, args.device)
    else:
        plain = as_target(told.load_target(args, sharding), args.device, sharding)
    config = to_shape.reading(config, lambda: count_layers(plain.model))
    target = plain.with_features(config.features)
    if to_optimise.dry_run:  # for which no target writes text
        data = planned_text(told, plain, args, config.num_heads)[0]
    else:
        data = told.prepare(plain, args, config.num_heads)
    fit_batch(args, *data.rows_and_learnt())
    run = to_cache, target, data, config, args
    parts = parts_of(*run, "" if to_optimise.dry_run else digest_for_all(plain))
    with ExitStack() as stack:
        forwards = Forwards(target, data.sight)
        if by_vllm:
            data.refuse_images("vLLM does")
            kept = parts[0].folder.parent
            dry = to_optimise.dry_run
            folder = Path(stack.enter_context(TemporaryDirectory())) if dry else kept
            engine = {"skip_tokenizer_init": told.tokenizer is None} | to_target.source()
            engine |= mapping(to_extract, "engine_args")
            forwards = stack.enter_context(extracting(target, folder, **engine))
            print(forwards.compare(data.rows))
        sentence = cheaper(*run, forwards)
        if args.process_index == 0:
            print(sentence)
        if to_optimise.dry_run:
            return
        write_parts(target, parts, forwards=forwards)
    if args.process_index == 0:
        flags = f"--hidden_cache read --hidden_cache_dir {parts[0].folder.parent}"
        print(f"Train from them with the same flags and {flags}")


main = command("medusa-heads prepare-hidden", prepare_hidden, __doc__, presets={"recipe": RECIPES})

if __name__ == "__main__":  # accelerate launch -m medusa_heads.cli.verbs.prepare_hidden
    raise SystemExit(main())
