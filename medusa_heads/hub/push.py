"""A checkpoint folder pushed to a hub: its own files and no others, in one commit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.checkpoint.adapter import read_adapter
from medusa_heads.checkpoint.files import (
    ADAPTER_FILES,
    ADAPTER_FOLDER,
    BENCHMARK_FILE,
    BENCHMARK_PICTURE,
    CARD_FILE,
    CUSTOM_GENERATE,
    KEPT_FILES,
    OWN_FILES,
    REPORT_FILE,
    VOCAB_MATRIX_FILE,
    WEIGHTS_FILE,
)
from medusa_heads.checkpoint.stored_heads import StoredHeads, read_stored, read_vocab_matrix
from medusa_heads.checkpoint.tensor_file import check_no_notes
from medusa_heads.contents import SIDECAR_FILE
from medusa_heads.errors import warn
from medusa_heads.files import expanded, read_json
from medusa_heads.hub.card import is_generated, make_card
from medusa_heads.hub.folder import own_file, own_files
from medusa_heads.hub.names import check_repo_id, wanted_revision
from medusa_heads.hub.published import published, published_target
from medusa_heads.hub.talking import LOG_IN, check_token, in_one_sentence
from medusa_heads.masking import shows_secret

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

_READ = (".json", ".md")
_MODEL_SUFFIXES = (".safetensors", ".bin", ".gguf", ".onnx")


@dataclass(frozen=True)
class Push:
    """What is pushed: by its name in the repository, a file as it lies there or new content."""

    repo_id: str
    files: Mapping[str, Path | bytes]

    def sizes(self) -> dict[str, int]:
        return {
            name: len(what) if isinstance(what, bytes) else what.stat().st_size
            for name, what in self.files.items()
        }


def prepare_push(
    checkpoint: str | os.PathLike[str],
    repo_id: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    benchmark: str | os.PathLike[str] | None = None,
    with_vocab_matrix: bool = False,
) -> Push:
    """All that a push of a checkpoint folder to `user/name` would upload, without asking any hub.
    Records are made anew of what may be published. A README.md that someone wrote is kept;
    otherwise one is generated. Raises ValueError: no checkpoint or a damaged one, a file that is a
    link or not what it should be, a target that nobody else could find, or a benchmark of another.

    Args:
        base_model: name of the target on the hub, as `user/name` or `user/name@revision`, where the
            checkpoint knows it by a path.
        license: of the heads, as the hub spells it, such as `apache-2.0`.
        benchmark: `report.json` of `medusa-heads benchmark`, or its folder; by default the one in
            the checkpoint, if any.
        with_vocab_matrix: publish the copy of the target's vocabulary matrix that lies beside the
            heads; it is the target's, and under the target's licence.
    """
    check_repo_id(repo_id)
    folder = expanded(checkpoint)
    found = own_files(folder, KEPT_FILES)
    stored = read_stored(folder)  # nobody is handed damaged heads
    target, revision = published_target(folder, stored.target, base_model)
    _check_parts(folder, found, stored, with_vocab_matrix=with_vocab_matrix)
    _add_benchmark(found, folder, benchmark, stored.target)
    texts = {name: _content(name, path) for name, path in found.items() if name.endswith(_READ)}
    files: dict[str, Path | bytes] = dict(found)
    card = texts.pop(CARD_FILE, None)
    for name, kept in texts.items():
        text = texts[name] = published(name, kept, stored, target, revision)
        written = text if isinstance(text, str) else _json(found[name], text)
        if text != kept:
            files[name] = written.encode()
    files |= {name: content.encode() for name, content in CUSTOM_GENERATE.items()}
    kept_card = f"{str(folder / CARD_FILE)!r} is kept as it is written"
    if card is None or is_generated(card):
        files[CARD_FILE] = make_card(repo_id, stored, texts, files, license=license).encode()
    elif license is not None:
        raise ValueError(
            f"{kept_card}, so license has no place: write it there, or remove the file to have one "
            "generated"
        )
    elif shows_secret(card):
        raise ValueError(
            f"{kept_card}, and shows what looks like a token or key: take it out, or remove the "
            "file to have one generated"
        )
    return Push(repo_id, {name: files[name] for name in OWN_FILES if name in files})


def _content(name: str, path: Path) -> Any:
    """Of a JSON file or a text, by the name it is pushed under."""
    if name.endswith(".json"):
        return read_json(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected text at {str(path)!r}: {error}") from error


def _json(path: Path, content: Any) -> str:
    """Of a file's published content. Raises ValueError: it holds numbers that JSON has not, which
    other readers would stumble over."""
    try:
        return json.dumps(content, indent=2, allow_nan=False) + "\n"
    except ValueError:
        raise ValueError(
            f"{str(path)!r} holds NaN or an infinite number, which is no JSON: correct the "
            "number, or make the file anew"
        ) from None


def _check_parts(
    folder: Path, found: dict[str, Path], stored: StoredHeads, *, with_vocab_matrix: bool
) -> None:
    """Leave out of what was found what is no part of these heads, or not to be published."""
    if stored.adapter is not None:
        read_adapter(folder / ADAPTER_FOLDER)
    if not with_vocab_matrix:
        found.pop(VOCAB_MATRIX_FILE, None)
    elif VOCAB_MATRIX_FILE in found:
        read_vocab_matrix(folder, stored.config)
    else:
        raise ValueError(
            f"with_vocab_matrix publishes {VOCAB_MATRIX_FILE}, and {str(folder)!r} has none: leave "
            "it out"
        )
    for name in ADAPTER_FILES if stored.adapter is None else ():
        found.pop(name, None)
    for name, path in found.items():
        if name.endswith(".safetensors"):
            check_no_notes(path)


def _add_benchmark(
    found: dict[str, Path],
    folder: Path,
    given: str | os.PathLike[str] | None,
    target: Mapping[str, Any],
) -> None:
    """`medusa-heads benchmark --report FOLDER` calls its files as training does: told apart, and
    pushed under names of their own."""
    path = expanded(given) if given is not None else folder / BENCHMARK_FILE
    if given is None and BENCHMARK_FILE not in found:
        path = folder / REPORT_FILE
        if REPORT_FILE not in found or not _is_benchmark(read_json(path)):
            return
        del found[REPORT_FILE]  # the training's, which the benchmark was written over
    path = path / REPORT_FILE if path.is_dir() else path
    report = read_json(own_file(path.parent, path.name) or path)
    if not _is_benchmark(report):
        raise ValueError(f"expected a report of medusa-heads benchmark at {str(path)!r}")
    of = report.get("target_fingerprint") or {}
    pairs = {key: (target.get(key), value) for key, value in of.items()}
    differing = [key for key, pair in pairs.items() if None not in pair and pair[0] != pair[1]]
    if differing:
        raise ValueError(
            f"the benchmark {str(path)!r} was measured on another target (its {differing[0]} "
            "differs): measure these heads"
        )
    found[BENCHMARK_FILE] = path
    pictures = (own_file(path.parent, name) for name in (f"{path.stem}.png", "report.png"))
    if picture := next(filter(None, pictures), None):
        found[BENCHMARK_PICTURE] = picture


def _is_benchmark(report: Mapping[str, Any]) -> bool:
    known = isinstance(report.get("target_fingerprint"), dict | None)
    return (
        known
        and isinstance(report.get("settings"), list)
        and isinstance(report.get("machine"), dict)
    )


def push(
    prepared: Push,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    token: str | bool | None = None,
) -> str:
    """Upload in one commit, so that the repository holds the old heads or the new ones, whole;
    returns the address of the commit, or of the pull request. Files of earlier heads that these
    have not are removed by the same commit; other files of the repository stay, and so does a card
    that was written there, in place of a generated one: a warning says so. Raises ValueError: the
    hub cannot be reached or refuses, or the repository holds something else.

    Args:
        private: a repository made here is private; one that is public is refused.
        revision: branch; made where there is none.
        create_pr: propose the commit to an existing repository, for its owner to merge.
        token: of the hub; by default the one that was logged in with.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    repo_id, token = prepared.repo_id, check_token(token)
    if token is False or (not token and get_token() is None):
        raise ValueError(f"a hub lets nobody push without a token: {LOG_IN}")
    api = HfApi(token=token)
    revision = wanted_revision(repo_id, revision)
    with in_one_sentence(repo_id, revision, token):
        info, has_branch = _repository(api, repo_id, private, revision, create_pr)
    if private and info.private is False:
        raise ValueError(
            f"{repo_id!r} exists and is public: make it private in its settings, or leave out "
            "private"
        )
    there = {sibling.rfilename for sibling in info.siblings or []}
    _check_holds_heads(repo_id, there)
    stale = sorted((set(OWN_FILES) & there) - set(prepared.files))
    files = dict(prepared.files)
    if CARD_FILE in there and isinstance(files.get(CARD_FILE), bytes):  # a generated one
        with in_one_sentence(repo_id, revision, token):
            found = Path(api.hf_hub_download(repo_id, CARD_FILE, revision=info.sha))
        card = found.read_text(encoding="utf-8", errors="replace")
        if card.strip("- \t\r\n") and not is_generated(card):  # it has words, of metadata even
            del files[CARD_FILE]
            warn(
                f"{CARD_FILE} of {repo_id!r} was written by hand and stays as it is: remove it "
                "there to have one generated"
            )
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(name, what if isinstance(what, bytes) else str(what))
        for name, what in files.items()
    ]
    operations += [CommitOperationDelete(name) for name in stale]
    with in_one_sentence(repo_id, revision, token):
        if not has_branch:
            api.create_branch(repo_id, branch=str(revision), revision=info.sha, exist_ok=True)
        done = api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message or "Upload heads",
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,  # what was looked at: anything newer is not written over
        )
    return str(done.pr_url if create_pr else done.commit_url)


def _repository(
    api: HfApi, repo_id: str, private: bool, revision: str | None, create_pr: bool
) -> tuple[ModelInfo, bool]:
    """The repository at the revision, or at main where a branch of that name is to begin there, and
    whether there is such a branch. A repository is made where there is none, but not for a
    proposal."""
    from huggingface_hub.errors import RevisionNotFoundError

    if not create_pr:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
    try:
        return api.model_info(repo_id, revision=revision), True
    except RevisionNotFoundError:
        if create_pr or revision is None:
            raise
        return api.model_info(repo_id), False


def _check_holds_heads(repo_id: str, files: set[str]) -> None:
    """Refuses to write over the config.json of what is no heads."""
    if any(name == SIDECAR_FILE or Path(name).stem == Path(WEIGHTS_FILE).stem for name in files):
        return
    if weights := sorted(name for name in files if name.endswith(_MODEL_SUFFIXES)):
        raise ValueError(
            f"{repo_id!r} holds another model ({weights[0]}), whose files would be written over: "
            "push to a repository of its own"
        )
