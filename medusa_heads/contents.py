"""What lies in a folder: heads, a draft model, or another model, which users may mix up."""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from medusa_heads.errors import NoModel, first_line
from medusa_heads.files import expanded, read_json

SIDECAR_FILE = "medusa_heads.json"  # beside heads
DRAFT_FILE = "draft_model.json"  # beside a draft model
MTP_FILE = "mtp_modules.json"  # beside multi-token-prediction modules that were trained
ADAPTER_CONFIG = "adapter_config.json"  # of an adapter, as peft stores it
STATE_FILE = "trainer_state.json"  # of a checkpoint that training resumes from, written last
_CONFIG_FILE = "config.json"
_MODEL_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")
_OF_DRAFTS = (_CONFIG_FILE, "model*.safetensors*")  # which a run writes as well
_OF_MODULES = ("model*.safetensors",)
_JUDGES = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "forced_eos_token_id")
_NUMBERS = (
    "top_p", "min_p", "typical_p", "no_repeat_ngram_size", "min_new_tokens", "num_beams",
    "guidance_scale",
)  # fmt: skip
_FOREIGN_NAMES = ("Eagle", "DFlash", "DSpark", "Medusa")
_FOREIGN_KEYS = ("speculators_config", "medusa_num_heads", "hydra_num_heads", "dflash_config")


def is_heads(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / SIDECAR_FILE).is_file()


def is_draft(folder: str | os.PathLike[str]) -> bool:
    """Whether a draft model that names its target lies there."""
    return (Path(folder) / DRAFT_FILE).is_file()


def is_mtp(folder: str | os.PathLike[str]) -> bool:
    """Whether multi-token-prediction modules that were trained for a target lie there."""
    return (Path(folder) / MTP_FILE).is_file()


def trained_in(folder: str | os.PathLike[str]) -> str | None:
    """What a run has left in a folder, in words; None where there is nothing of the kind."""
    kinds = {is_heads: "heads", is_draft: "a draft model", is_mtp: "multi-token-prediction modules"}
    return next((said for lies_there, said in kinds.items() if lies_there(folder)), None)


def is_model(folder: str | os.PathLike[str]) -> bool:
    """Whether a whole model lies there, which heads are not: those say nothing of an architecture.
    ValueError where its configuration cannot be read."""
    return not is_heads(folder) and _has_architecture(folder)


def _has_architecture(folder: str | os.PathLike[str]) -> bool:
    file = Path(folder) / _CONFIG_FILE
    return file.is_file() and "model_type" in read_json(file)


def foreign_model(folder: str | os.PathLike[str]) -> str | None:
    """The file by which a folder is that of a model which no run of this package wrote; None where
    it is none. ValueError where its configuration cannot be read."""
    folder = Path(folder)
    own = (is_draft(folder) and _OF_DRAFTS) or (is_mtp(folder) and _OF_MODULES) or ()
    if _CONFIG_FILE not in own and _has_architecture(folder):
        return _CONFIG_FILE
    found = sorted(path.name for pattern in _MODEL_WEIGHTS for path in folder.glob(pattern))
    return next((name for name in found if not any(fnmatch(name, each) for each in own)), None)


def refuse_model(folder: str | os.PathLike[str]) -> None:
    """Raises ValueError where heads would come to lie among the files of a model."""
    model = None if is_heads(folder) else DRAFT_FILE if is_draft(folder) else foreign_model(folder)
    if model is not None:
        raise ValueError(f"{str(folder)!r} holds a model ({model}): name another folder for heads")


def _holding(pattern: str) -> Callable[[str | os.PathLike[str]], bool]:
    return lambda folder: any(path.is_file() for path in Path(folder).glob(pattern))


_is_adapter = _holding(ADAPTER_CONFIG)


def _is_foreign(folder: str | os.PathLike[str]) -> bool:
    """Whether heads as other projects store them lie there, by what their configurations alone
    say."""
    file = Path(folder) / _CONFIG_FILE
    if not file.is_file():
        return False
    said = read_json(file)
    named = str(said.get("architectures"))
    return any(name in named for name in _FOREIGN_NAMES) or any(
        key in said for key in _FOREIGN_KEYS
    )


def refuse_heads(name: str | os.PathLike[str]) -> None:
    """Raises NoModel where heads stand in the place of a model."""
    if is_heads(expanded(name)):
        raise NoModel(
            f"expected a causal language model at {os.fspath(name)!r}, found heads, which only "
            "draft on their target: name a whole model here, and heads where a command asks for a "
            "heads checkpoint"
        )


def refuse_adapter(name: str | os.PathLike[str]) -> None:
    """Raises NoModel where an adapter alone stands in the place of a model's own files."""
    folder = expanded(name)
    if _is_adapter(folder) and not _has_architecture(folder):
        raise NoModel(
            f"expected the files of a causal language model at {os.fspath(name)!r}, found a LoRA "
            "adapter: merge it into its target, and name the folder with both"
        )


def refuse_judges(config: Any, name: str) -> None:
    """Raises ValueError: a model was tuned to judge texts, as a reward model is, and not to write
    them. Where its lm_head is its token embeddings, no weight of a causal LM is missing."""
    said = getattr(config, "architectures", None)  # as config.json has it, whatever that is
    kinds = map(str, said if isinstance(said, list) else [said])
    if (judge := next((kind for kind in kinds if kind.endswith(_JUDGES)), None)) is not None:
        raise NoModel(
            f"expected a causal language model at {name!r}, found a {judge}, which was tuned to "
            "judge texts and not to write them: name the model that it was made from, or mend "
            "'architectures' in its config.json where its weights are a causal language model's"
        )


def refuse_settings(generation: Any, name: str) -> None:
    """Raises NoModel: a model's own settings of generation hold values of other types than
    transformers computes with, which it does not compare as it reads them."""
    for key in _IDS:
        said = getattr(generation, key, None)
        if said is not None and not _are_ids(said if isinstance(said, list) else [said]):
            _refuse_setting(key, said, "the id of a token or a list of such", name)
    for key in _NUMBERS:
        said = getattr(generation, key, None)
        if not isinstance(said, int | float | None):
            _refuse_setting(key, said, "a number", name)


def _are_ids(said: list[Any]) -> bool:
    return bool(said) and all(isinstance(each, int) for each in said)


def _refuse_setting(key: str, said: Any, expected: str, name: str) -> None:
    raise NoModel(
        f"the generation settings of {name!r} say {key} {said!r}, expected {expected}: mend its "
        "generation_config.json"
    )


def said_of(error: Exception, name: str) -> str:
    """What transformers says of a model that it cannot load; of weights of other sizes it tells its
    log alone."""
    if "ignore_mismatched_sizes" not in str(error):
        return first_line(error)
    if _is_adapter(name):
        return (
            "the adapter has weights of other sizes than its model, as where tokens were added to "
            "it: merge it into its model with peft, and name the folder in which that is saved"
        )
    return "its weights have other sizes than its config.json says: save or download it anew"


_INSTEAD: dict[Callable[[str | os.PathLike[str]], bool], str] = {
    is_draft: "found a draft model: use it with medusa-heads generate and chat, or as "
    "--draft_model of its target, or train heads with train-heads",
    is_mtp: "found multi-token-prediction modules: use them with medusa-heads generate and chat, "
    "or write them into a copy of their target with medusa-heads export --to transformers",
    _is_adapter: "found a LoRA adapter: merge it into its target, and train heads for that",
    _is_foreign: "found heads of another project: read them with medusa-heads convert",
    is_model: "found a model without heads: train some with train-heads, convert another project's "
    "with medusa-heads convert, or draft without any (medusa-heads generate --drafter auto)",
    _holding(STATE_FILE): "found what training resumes from: let the run end (train-heads "
    "--resume_from_checkpoint last), and name its output_dir",
    _holding(f"checkpoint-*/{STATE_FILE}"): "found a run that has not ended: let it end with "
    "train-heads --resume_from_checkpoint last",
    lambda path: Path(path).is_file(): "found a file: name the folder that it lies in",
    lambda _: True: "found none: train one with train-heads, or convert another project's with "
    "medusa-heads convert",
}


def instead_of_heads(folder: str | os.PathLike[str]) -> str:
    """What was found where heads were expected, and what to do about it."""
    return next(said for lies_there, said in _INSTEAD.items() if lies_there(folder))
