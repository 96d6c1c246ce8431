"""`medusa-heads regenerate --model_name_or_path TARGET --output_dir FOLDER`: the target answers a
corpus's prompts itself, and train-heads --dataset FOLDER learns from that.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.choices import apply_choice, print_choices
from medusa_heads.cli.flags.arguments import command
from medusa_heads.errors import first_line, warn
from medusa_heads.files import expanded
from medusa_heads.inference.regeneration.arguments import RegenerateArguments, longest_answer
from medusa_heads.settings import mapping

if TYPE_CHECKING:
    from medusa_heads.inference.regeneration.answers import Backend
    from medusa_heads.target.target import TargetModel


def regenerate(arguments: RegenerateArguments) -> None:
    """Ask, write the dataset, and say what became of every prompt."""
    from transformers.utils.logging import disable_progress_bar

    from medusa_heads.inference.regeneration.answers import Sampling
    from medusa_heads.inference.regeneration.dialogues import read_dialogues
    from medusa_heads.inference.regeneration.regenerate import answer_dialogues
    from medusa_heads.inference.regeneration.store import check_output, rows_there, write_output
    from medusa_heads.inference.regeneration.tables import read_table
    from medusa_heads.target.loading import find_tokenizer

    disable_progress_bar()
    folder = expanded(arguments.output_dir)
    shard = (arguments.shard_index, arguments.num_shards)
    check_output(folder, shard)
    options = mapping(arguments, "chat_template_kwargs")
    corpus = read_table(
        arguments.dataset,
        arguments.dataset_split,
        config=arguments.dataset_config,
        on_bad_row=arguments.on_bad_row,
    )
    # Token ids need none.
    tokenizer: Any = find_tokenizer(
        arguments.model_name_or_path, trust_remote_code=arguments.trust_remote_code
    )
    dialogues = read_dialogues(
        corpus,
        tokenizer,
        turns=arguments.turns,
        num_prompts=arguments.num_prompts,
        prompt_length=arguments.prompt_length,
        seed=arguments.seed,
        template_options=options,
        shard=shard,
    )
    backend, target = (
        (_elsewhere(arguments, tokenizer, talks=dialogues.talks), None)
        if arguments.backend in ("server", "vllm")
        else _local(arguments)
    )
    print_choices()
    result = answer_dialogues(
        backend,
        dialogues,
        Sampling(
            arguments.max_new_tokens or longest_answer(backend.max_positions),
            *(arguments.temperature, arguments.seed, arguments.top_p, arguments.top_k),
        ),
        greedy_share=arguments.greedy_share,
        cache_dir=arguments.answers_dir or folder / "answers",
    )
    record: dict[str, Any] = {
        "target": {"name_or_path": arguments.model_name_or_path},
        "answers": result.described,
        "talks": dialogues.talks,
        "settings": asdict(arguments),
    }
    if target is not None:
        record["target"] |= {"revision": target.revision, **target.fingerprint()}
    before = rows_there(folder)
    file = write_output(result.rows, result.accounting, folder, record)
    for mapped in result.rows.cache_files:  # copied by now
        Path(mapped["filename"]).unlink()
    if len(result.rows) < before:
        warn(
            f"{str(folder)!r} held {before} rows, and now holds the {len(result.rows)} that were "
            "asked for: answers to the others are kept, and the same prompts have them again"
        )
    accounting = result.accounting
    print(accounting)
    print(f"{len(result.rows)} rows in {folder}, what became of each prompt in {file}")
    if arguments.strict and accounting.done < accounting.asked:
        raise ValueError(
            f"{accounting.asked - accounting.done} of {accounting.asked} answers are missing, and "
            f"strict was asked for: {file} names them"
        )


def _local(arguments: RegenerateArguments) -> tuple[Backend, TargetModel]:
    """The target, and who has it answer here."""
    from medusa_heads.target.target import TargetModel

    target = TargetModel.from_pretrained(
        arguments.model_name_or_path,
        dtype=arguments.dtype,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
        use="tree" if arguments.backend == "heads" else "batch",
        on_choice=apply_choice,
    )
    sizes = {} if arguments.batch_size is None else {"batch_size": arguments.batch_size}
    if arguments.backend == "heads":
        from medusa_heads.inference.models.medusa import MedusaModel
        from medusa_heads.inference.regeneration.transformers_backend import HeadsBackend

        assert arguments.heads is not None
        model = MedusaModel.from_pretrained(arguments.heads, target=target)
        return HeadsBackend(model, **sizes), target
    if arguments.backend == "continuous":
        try:
            from medusa_heads.inference.regeneration.continuous_backend import ContinuousBackend
        except ImportError as error:  # it is made of parts that transformers does not promise
            raise ValueError(
                "continuous batching is another one in this version of transformers "
                f"({first_line(error)}): choose another backend, or install another version"
            ) from error
        return ContinuousBackend(target, **sizes), target
    from medusa_heads.inference.regeneration.transformers_backend import TransformersBackend

    return TransformersBackend(target, num_workers=arguments.num_workers, **sizes), target


def _elsewhere(arguments: RegenerateArguments, tokenizer: Any, *, talks: bool) -> Backend:
    """vLLM or a server: the target's weights are not loaded by us. `talks`: it is asked in
    conversations."""
    if tokenizer is None:
        raise ValueError(
            "answers are read with the target's tokenizer: name the hub id or folder that has it "
            "in --model_name_or_path"
        )
    from transformers import AutoConfig, GenerationConfig

    from medusa_heads.data.chat import ChatTemplate
    from medusa_heads.hub_probe import asking_hub
    from medusa_heads.inference.regeneration.replies import ends_of_answers

    name = arguments.model_name_or_path
    trust: dict[str, Any] = {"trust_remote_code": arguments.trust_remote_code}
    with asking_hub(name) as options:
        config = AutoConfig.from_pretrained(name, **trust, **options)
        try:
            ends = GenerationConfig.from_pretrained(name, **options).eos_token_id
        except OSError:
            ends = None
    known = [ends] if isinstance(ends, int) else list(ends or [])
    # Several tokens may end a text; the tokenizer says which one does, and the template which one
    # ends an answer.
    known = list(dict.fromkeys([tokenizer.eos_token_id, *known]))
    known = [token for token in known if token is not None]
    if talks:
        chat = ChatTemplate(tokenizer, arguments=mapping(arguments, "chat_template_kwargs"))
        known = ends_of_answers(chat, known)
    if arguments.backend == "vllm":
        from medusa_heads.inference.regeneration.vllm_backend import VllmBackend

        own = mapping(arguments, "engine_args")
        if "model" in own:
            raise ValueError("engine_args cannot name the model: --model_name_or_path does")
        engine = trust | {"dtype": arguments.dtype} | own
        return VllmBackend(name, ends=known, **engine)
    from medusa_heads.inference.regeneration.server_backend import ServerBackend

    assert arguments.base_url is not None
    settings = ("endpoint", "token_ids", "concurrency", "retries", "timeout", "api_key_variable")
    return ServerBackend(
        arguments.base_url,
        arguments.model or name,
        tokenizer,
        ends=known,
        max_positions=getattr(config.get_text_config(), "max_position_embeddings", None),
        vocab_size=getattr(config.get_text_config(), "vocab_size", None),
        **{setting: getattr(arguments, setting) for setting in settings},
    )


main = command("medusa-heads regenerate", regenerate, __doc__, "model_name_or_path")
