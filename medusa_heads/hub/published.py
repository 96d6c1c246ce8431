"""What of a checkpoint's own records goes to a hub: by allow-lists, and without secrets and paths.

What is not named here stays at home: a user's own notes, folders, names of data nobody else has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_heads.checkpoint.adapter import check_adapter_config, describe_adapter
from medusa_heads.checkpoint.files import ADAPTER_FILES, BENCHMARK_FILE, CONFIG_FILE, REPORT_FILE
from medusa_heads.checkpoint.stored_heads import StoredHeads, foreign_config, to_sidecar
from medusa_heads.contents import SIDECAR_FILE
from medusa_heads.files import is_path
from medusa_heads.hub.names import (
    check_repo_id,
    could_be_on_hub,
    is_local,
    is_repo_id,
    local_target,
    split_revision,
)
from medusa_heads.masking import is_secret_name, masked, masked_text, shows_secret
from medusa_heads.trees.statistics import HeadStatistics

LOCAL_DATA = "local data"  # stands for corpora that are no hub's
_TARGET = ("model_type", "hidden_size", "vocab_size", "lm_head_sha256")
_STORY = (
    "command", "created", "python", "versions", "target_weights_sha256", "heads", "loss",
    "joint", "training_set", "held_out_set", "training_arguments",
)  # fmt: skip
_STORY_NUMBERS = {
    "data": ("eval_share", "eval_rows", "max_length", "packing", "streaming", "shuffle_buffer"),
    "distillation": (
        "self_distill", "num_prompts", "num_eval_prompts", "prompt_length",
        "continuation_length", "greedy_share", "temperature",
    ),
}  # fmt: skip
_REPORTS = {
    REPORT_FILE: {
        "report_version", "target", "heads", "held_out", "tokens_per_step", "accuracy",
        "calibration", "static_trees", "dynamic_trees", "tree", "training",
    },
    BENCHMARK_FILE: {
        "target", "machine", "settings", "created", "target_fingerprint", "parameters",
        "temperature", "seed", "prompts_left_out",
    },
}  # fmt: skip
_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+:-]{0,79}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[\w.+/-]{1,255}", re.ASCII)
_PART = r"""[^\s"'`=,;:|<>()\[\]{}/\\]+"""  # of a path
# An absolute path, or one from the home directory or above the working one, within other text; and
# what stands behind it in a sentence or a cell, where it may go on if a folder's name holds spaces.
_PATH = re.compile(
    rf"""(?:file://|(?<![\w/.~\\-]))  # no part of a word, a URL or a relative path
        (?P<path>
            (?:~[\w.-]*|\.\.|[A-Za-z]:(?=[/\\])|\\(?=\\{_PART}\\)|(?=/)) (?:[/\\]{_PART})+
            (?:[ ](?!~|\.\.){_PART}(?:[/\\]{_PART})+)* [/\\]?
        )
        (?P<rest>(?:(?!\b(?:[A-Za-z]:[/\\]|file://))[^\n"'`=,;:|<>()\[\]{{}}])*)""",
    re.VERBOSE,
)
_PATH_ALONE = re.compile(r"(?:~?/|\.\./|[A-Za-z]:\\|\\\\)[^\n]*$")
_WITH_SEPARATORS = re.compile(r"(?<!\S)[^\s/\\]*[/\\]\S+")


def published_target(
    folder: Path, target: Mapping[str, Any], base_model: str | None
) -> tuple[str, str | None]:
    """Name and revision by which others find the target: as the user gives it, else as the sidecar
    of the checkpoint in `folder` has it. Raises ValueError: the checkpoint knows it by a path, and
    no other name is given."""
    if base_model is not None:
        name, revision = split_revision(base_model)
        return check_repo_id(name), revision
    name, revision = target.get("name_or_path") or "", target.get("revision")
    # A name without a user may be one of the hub's own old ones, such as gpt2, or a folder's.
    on_hub = could_be_on_hub(name) and ("/" in name or revision is not None)
    # Both stand in the programs of the card, and a stranger may have written them.
    on_hub = on_hub and _REVISION.fullmatch(revision or "main") is not None
    here = is_path(name) or local_target(name, revision, folder) is not None
    if not name or here or not on_hub:
        known = f"only as {Path(name).name!r} on this machine" if name else "not by name"
        raise ValueError(
            f"the checkpoint knows its target {known}, where nobody else finds it: give its name "
            "on the hub with base_model (--base_model user/name)"
        )
    return name, revision


def published(
    name: str, content: Any, stored: StoredHeads, target: str, revision: str | None
) -> Any:
    """The text or JSON of a checkpoint's file, as others may read it, who find the target by this
    name and revision. Raises ValueError: an adapter's configuration that is none of a plain
    adapter."""
    if name == SIDECAR_FILE:
        fingerprint = {key: stored.target[key] for key in _TARGET if key in stored.target}
        adapter, statistics = stored.adapter, stored.statistics
        told = replace(
            stored,
            target={"name_or_path": target, "revision": revision, **_settings(fingerprint)},
            adapter=adapter and _settings({k: adapter.get(k) for k in ("folder", "sha256")}),
            statistics=statistics and HeadStatistics.from_dict(statistics).to_dict(),
            provenance=published_story(stored.provenance),
        )
        return to_sidecar(told, content["weights_sha256"])
    if name == CONFIG_FILE:
        return foreign_config(stored, target)
    if name == ADAPTER_FILES[0]:
        return describe_adapter(check_adapter_config(content, name), target)
    if isinstance(content, Mapping):
        allowed = _REPORTS.get(name, set())
        content = {key: value for key, value in content.items() if key in allowed}
    known_as = str(stored.target.get("name_or_path") or "")
    return without_paths(masked(content), renamed=(known_as, target))


def published_story(story: Mapping[str, Any]) -> dict[str, Any]:
    """What of a checkpoint's provenance says how it came to be, and not who made it where."""
    story = masked(story)
    told: dict[str, Any] = _settings({name: story[name] for name in _STORY if name in story})
    if _COMMIT.fullmatch(str(story.get("git_sha"))):
        told["git_sha"] = story["git_sha"]
    for section, names in _STORY_NUMBERS.items():
        given = story.get(section)
        if isinstance(given, Mapping):
            told[section] = {
                name: given[name]
                for name in names
                if name in given
                and isinstance(given[name], int | float | None)
                and _is_setting(given[name])
            }
    data, origin = story.get("data"), story.get("converted_from")
    if isinstance(data, Mapping) and data.get("dataset"):
        told["data"] = {"dataset": _datasets(data["dataset"]), **told["data"]}
    if isinstance(origin, Mapping):
        (source,) = _datasets([origin.get("source")])
        told["converted_from"] = {**_settings({"format": origin.get("format")}), "source": source}
    return told


def _datasets(named: Any) -> list[str]:
    """Names of the hub's as they are, and one word for all others."""
    names = named if isinstance(named, Sequence) and not isinstance(named, str) else [named]
    return list(dict.fromkeys(name if is_published(name) else LOCAL_DATA for name in names))


def is_published(name: Any) -> bool:
    """Whether others find it by this name: a repository on a hub, or Python's standard library."""
    # A file's name may look like one of the hub's: data/private.jsonl.
    return name == "stdlib" or (
        isinstance(name, str)
        and is_repo_id(split_revision(name)[0])
        and not is_local(name)
        and not name.endswith(_DATA_SUFFIXES)
        and not shows_secret(name)
    )


def _settings(value: Any) -> Any:
    """Numbers, and words that a program has chosen: no names of files, no sentences."""
    if isinstance(value, Mapping):
        return {
            key: _settings(item)
            for key, item in value.items()
            if isinstance(key, str)
            and _is_setting(key)
            and not is_secret_name(key)
            and _is_setting(item)
        }
    if isinstance(value, list | tuple):
        return [_settings(item) for item in value if _is_setting(item)]
    return value


def _is_setting(value: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no word for it
        return False
    return not isinstance(value, str) or (bool(_WORD.fullmatch(value)) and not shows_secret(value))


def without_paths(value: Any, renamed: tuple[str, str] | None = None) -> Any:
    """`value`, plain JSON, with every path of this machine cut down to its last part and every
    secret starred out, and one name exchanged for another wherever it is met."""
    if isinstance(value, dict):
        return {_of_text(key, renamed): without_paths(item, renamed) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item, renamed) for item in value]
    return _of_text(value, renamed) if isinstance(value, str) else value


def _of_text(text: str, renamed: tuple[str, str] | None) -> str:
    if renamed is not None and renamed[0]:
        alone = rf"(?<![\w./~-]){re.escape(renamed[0])}(?![\w/-])"
        text = re.sub(alone, lambda _: renamed[1], text)
    # A path alone, or behind `--flag=`, may hold spaces.
    before, equals, last = text.rpartition("=")
    if _PATH_ALONE.match(last):
        text = f"{before}{equals}{_last_part(last)}"
    return _PATH.sub(_cut_down, masked_text(text))


def _cut_down(found: re.Match[str]) -> str:
    rest = _WITH_SEPARATORS.sub(lambda word: _last_part(word.group()), found["rest"])
    return _last_part(found["path"]) + rest


def _last_part(path: str) -> str:
    return re.split(r"[/\\]+", path.rstrip("/\\"))[-1]
