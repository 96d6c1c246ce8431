"""`medusa-heads regenerate --model_name_or_path TARGET --output_dir FOLDER`: the target answers a
corpus's prompts itself, and train-heads --dataset FOLDER learns from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.flags.arguments import parse_arguments, run_command
from medusa_heads.cli.settled import settle, tell_choices
from medusa_heads.files import parse_json
from medusa_heads.inference.regeneration.arguments import RegenerateArguments

if TYPE_CHECKING:
    from medusa_heads.inference.regeneration.answers import Backend
    from medusa_heads.target.target import TargetModel


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> None:
        (arguments,) = parse_arguments(
            (RegenerateArguments,),
            argv,
            prog="medusa-heads regenerate",
            description=__doc__ or "",
            positional="model_name_or_path",
        )
        run_regenerate(arguments)

    return run_command(work)


def run_regenerate(arguments: RegenerateArguments) -> None:
    """Ask, write the dataset, and say what became of every prompt.

    Raises:
        ValueError: unusable arguments; not one answer; or, if `strict`, not all of them.
    """
    from transformers.utils.logging import disable_progress_bar

    from medusa_heads.inference.regeneration.answers import Sampling
    from medusa_heads.inference.regeneration.dialogues import read_dialogues, read_table
    from medusa_heads.inference.regeneration.regenerate import answer_dialogues
    from medusa_heads.inference.regeneration.store import check_output, write_output

    disable_progress_bar()
    folder = Path(arguments.output_dir)
    check_output(folder)
    options = _template_options(arguments.chat_template_kwargs)
    corpus = read_table(arguments.dataset, arguments.dataset_split, config=arguments.dataset_config)
    tokenizer = _tokenizer(arguments)
    dialogues = read_dialogues(
        corpus,
        tokenizer,
        turns=arguments.turns,
        num_prompts=arguments.num_prompts,
        prompt_length=arguments.prompt_length,
        seed=arguments.seed,
        template_options=options,
    )
    backend = _server(arguments, tokenizer)
    target = None
    if backend is None:
        target = _target(arguments)
        backend = _local(arguments, target)
    tell_choices()
    result = answer_dialogues(
        backend,
        dialogues,
        Sampling(arguments.max_new_tokens, arguments.temperature, arguments.seed),
        greedy_share=arguments.greedy_share,
        cache_dir=arguments.answers_dir or folder / "answers",
    )
    record: dict[str, Any] = {
        "target": {"name_or_path": arguments.model_name_or_path},
        "answers": result.described,
        "settings": asdict(arguments),
    }
    if target is not None:
        revision = getattr(target.model.config, "_commit_hash", None)
        record["target"] |= {"revision": revision, **target.fingerprint()}
    file = write_output(result.rows, result.accounting, folder, record)
    accounting = result.accounting
    print(accounting)
    print(f"{len(result.rows)} rows in {folder}, what became of each prompt in {file}")
    if arguments.strict and accounting.done < accounting.asked:
        raise ValueError(
            f"{accounting.asked - accounting.done} of {accounting.asked} answers are missing, and "
            f"strict was asked for: {file} names them"
        )


def _template_options(given: dict[str, Any] | str | None) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except ValueError as error:
            raise ValueError(f"chat_template_kwargs must be JSON, got {given!r}") from error
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"chat_template_kwargs must map names to values, got {given!r}")
    return given or {}


def _tokenizer(arguments: RegenerateArguments) -> Any:
    """The tokenizer beside the target, None where there is none: token ids need none."""
    from medusa_heads.target.loading import load_tokenizer

    try:
        return load_tokenizer(
            arguments.model_name_or_path, trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError):
        return None


def _target(arguments: RegenerateArguments) -> TargetModel:
    from medusa_heads.target.target import TargetModel

    return TargetModel.from_pretrained(
        arguments.model_name_or_path,
        dtype=arguments.dtype,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
        use="tree" if arguments.backend == "heads" else "batch",
        on_choice=settle,
    )


def _local(arguments: RegenerateArguments, target: TargetModel) -> Backend:
    sizes = {} if arguments.batch_size is None else {"batch_size": arguments.batch_size}
    if arguments.backend == "heads":
        from medusa_heads.inference.models.medusa import MedusaModel
        from medusa_heads.inference.regeneration.transformers_backend import HeadsBackend

        assert arguments.heads is not None
        return HeadsBackend(MedusaModel.from_pretrained(arguments.heads, target=target), **sizes)
    if arguments.backend == "continuous":
        from medusa_heads.inference.regeneration.continuous_backend import ContinuousBackend

        return ContinuousBackend(target, **sizes)
    from medusa_heads.inference.regeneration.transformers_backend import TransformersBackend

    return TransformersBackend(target, num_workers=arguments.num_workers, **sizes)


def _server(arguments: RegenerateArguments, tokenizer: Any) -> Backend | None:
    """The server, for which the target's weights are not needed here; None for other backends."""
    if arguments.backend != "server":
        return None
    if tokenizer is None:
        raise ValueError(
            "a server's answers are tokenised with the target's tokenizer: name the hub id or "
            "folder that has it in --model_name_or_path"
        )
    from transformers import AutoConfig, GenerationConfig

    from medusa_heads.inference.regeneration.server_backend import ServerBackend
    from medusa_heads.target.loading import asking_hub

    name = arguments.model_name_or_path
    with asking_hub(name) as options:
        config = AutoConfig.from_pretrained(
            name, trust_remote_code=arguments.trust_remote_code, **options
        )
        try:
            ends = GenerationConfig.from_pretrained(name, **options).eos_token_id
        except OSError:
            ends = None
    known = [ends] if isinstance(ends, int) else list(ends or [])
    # Several tokens may end a text; the tokenizer says which one ends an answer.
    own = tokenizer.eos_token_id
    known = [token for token in dict.fromkeys([own, *known]) if token is not None]
    assert arguments.base_url is not None
    return ServerBackend(
        arguments.base_url,
        arguments.model or name,
        tokenizer,
        ends=known,
        max_positions=getattr(config.get_text_config(), "max_position_embeddings", None),
        endpoint=arguments.endpoint,
        token_ids=arguments.token_ids,
        concurrency=arguments.concurrency,
        retries=arguments.retries,
        timeout=arguments.timeout,
        api_key_variable=arguments.api_key_variable,
    )
