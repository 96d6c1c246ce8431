"""A target with its heads attached."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.checkpoint.adapter import load_adapter
from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.checkpoint.files import ADAPTER_FOLDER
from medusa_heads.checkpoint.stored_heads import StoredHeads, read_sidecar
from medusa_heads.heads import DraftHeads
from medusa_heads.heads.previewed import with_preview
from medusa_heads.hub.pull import find_checkpoint
from medusa_heads.hub.push import prepare_push, push
from medusa_heads.inference.lookup.corpus_files import Corpus, find_corpus
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.inference.models.named_target import load_target
from medusa_heads.inference.models.saving import save_model
from medusa_heads.inference.plan.heads import HeadsPlan, ReadCorpus
from medusa_heads.inference.plan.trees import TreeSpec
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MedusaModel(AssistedModel):
    """A target that drafts for itself.

    Args:
        target: the causal LM; it is not modified.
        heads: heads that fit it.
        statistics: measured ranks of the heads, from which the best tree of a size is built.
        tree: which tree to draft, in the words of plan/trees.py: `"auto"`, a number of nodes,
            `"dynamic:16"`, .., or the tree itself as a list of rank paths.
        corpus: text that the target may write parts of, continued wherever the target's own text
            ends as it did somewhere there: a file or folder, a saved index, or token ids, one
            sequence a document; for the trees `"auto"`, `"16+suffix"` and `"suffix"`.
        acceptance: `"lossless"`, or a lossy rule: `"typical"`, `"threshold"`, `"log_ratio"`.
        acceptance_settings: of a lossy rule, such as `{"epsilon": 0.09, "delta": 0.3}`.
        compile: verify through torch.compile: one graph over a cache of fixed size, replayed as a
            CUDA graph on a GPU. The first text takes the seconds of compiling.
        compile_backend: of torch.compile.
        deterministic: verify as many nodes in every step, whatever time it takes, and carry nothing
            from text to text: what is rounded, in bf16 say, is so rounded the same way every time.

    Attributes:
        heads: as given, on the target's device and in its dtype.
        drafting: the same heads as drafters read them: on a CPU, with a preview of a large
            vocabulary. A view of the weights in `heads`.

    Raises:
        ValueError: heads or tree do not fit the target.
        UnsupportedArchitecture: the target cannot be decoded exactly with a tree.
    """

    def __init__(
        self,
        target: TargetModel | PreTrainedModel,
        heads: DraftHeads,
        *,
        statistics: HeadStatistics | None = None,
        tree: TreeSpec = "auto",
        corpus: Corpus | None = None,
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        compile_backend: str | Callable[..., Any] = "inductor",
        deterministic: bool = False,
    ) -> None:
        super().__init__(
            target,
            acceptance=acceptance,
            acceptance_settings=acceptance_settings,
            compile=compile,
            compile_backend=compile_backend,
        )
        self.deterministic = deterministic
        heads.share(self.target)
        self.heads = heads.to(device=self.target.device, dtype=self.target.dtype).eval()
        self.drafting = with_preview(self.heads)
        self.statistics = statistics
        self._read_corpus = None if corpus is None else _reader(corpus, self.target)
        # Where the heads were loaded from, and what stood there beside them.
        self.checkpoint: Path | None = None
        self.stored: StoredHeads | None = None
        self.use_tree(tree)

    def use_tree(self, tree: TreeSpec) -> None:
        """Draft this tree from now on; `self.tree` says which it is, also where `auto` chose.

        Raises:
            ValueError: an unknown form, or a tree that does not fit the heads; the one before it
                stays.
        """
        plan = self._plan(tree)
        self.drafter, self.tree = plan.drafter, plan.tree
        if self.deterministic:
            self._fresh = lambda: self._plan(self.tree).drafter

    def _plan(self, tree: TreeSpec) -> HeadsPlan:
        return HeadsPlan(
            self.target,
            self.drafting,
            self.statistics,
            tree,
            chain_only=self._chain_only,
            acceptance=self.acceptance,
            read_corpus=self._read_corpus,
            deterministic=self.deterministic,
        )

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | os.PathLike[str],
        *,
        target: str | os.PathLike[str] | TargetModel | PreTrainedModel | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        tree: TreeSpec = "auto",
        corpus: Corpus | None = None,
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        deterministic: bool = False,
        merge_adapter: bool = False,
        **target_kwargs: Any,
    ) -> MedusaModel:
        """Load a heads checkpoint and its target, and the adapter they were trained with if any.

        An adapter makes another model of the target: lossless then means the text of the target
        with its adapter. A target that is loaded here gets it; one in memory must carry it.

        Args:
            checkpoint: folder written by train-heads, or a hub's repository, as `user/name` or
                `user/name@revision`.
            target: a model in memory, or a hub id or path; by default the one the heads name, at
                the revision they were trained on.
            revision: branch, tag or commit of the repository of the heads.
            token, cache_dir, local_files_only: of the hub, for the heads and a target loaded here.
            tree, corpus, acceptance, acceptance_settings, compile, deterministic: see the class.
            merge_adapter: add the adapter to the target's matrices: faster, and in bf16 rounded.
            target_kwargs: passed on when the target is loaded: `dtype`, `device` (by default the
                best here), `device_map`, `quantization_config`, `attn_implementation`,
                `trust_remote_code`, ..

        Raises:
            ValueError: checkpoint or target missing, damaged, or not belonging together.
        """
        in_memory = target is not None and not isinstance(target, str | os.PathLike)
        if in_memory and target_kwargs:
            raise ValueError(
                f"{sorted(target_kwargs)} apply to a target that is loaded here, but one in memory "
                "was given: leave them out"
            )
        hub: dict[str, Any] = {
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
        }
        folder = find_checkpoint(checkpoint, revision=revision, **hub)
        adapted = None
        if target is None or isinstance(target, str | os.PathLike):
            view = load_target(folder, target, **hub, **target_kwargs)
            if read_sidecar(folder).get("adapter") is not None:
                adapted = load_adapter(view.model, folder / ADAPTER_FOLDER)
        else:
            view = target if isinstance(target, TargetModel) else TargetModel(target)
        trusted = bool(target_kwargs.get("trust_remote_code"))
        loaded = load_heads(folder, view)
        if merge_adapter:
            if adapted is None:
                raise ValueError(
                    "merge_adapter merges an adapter that is loaded here, and there is none: "
                    "leave it out"
                )
            adapted.merge_and_unload()
        model = cls(
            view,
            loaded.heads,
            statistics=loaded.statistics,
            tree="none",
            acceptance=acceptance,
            acceptance_settings=acceptance_settings,
            compile=compile,
            deterministic=deterministic,
        )
        if corpus is not None:
            model._read_corpus = _reader(corpus, view, trust_remote_code=trusted)
        model.use_tree(tree)
        model.checkpoint, model.stored = folder, replace(loaded.stored, tensors={})
        return model

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, with_vocab_matrix: bool = False
    ) -> Path:
        """Write a checkpoint folder of the heads as they are now, without any weight of the target.

        What came with heads that were loaded goes along: statistics, adapter, reports.

        Args:
            folder: receives them.
            with_vocab_matrix: lay a copy of the target's vocabulary matrix beside the heads, with
                which vLLM 0.32 reads the folder as it is.

        Raises:
            ValueError: the target carries an adapter that no checkpoint came with, or no engine
                would read the matrix.
            OSError: the folder cannot be written.
        """
        return save_model(self, folder, with_vocab_matrix=with_vocab_matrix)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
        token: str | bool | None = None,
        base_model: str | None = None,
        license: str | None = None,
        benchmark: str | os.PathLike[str] | None = None,
        with_vocab_matrix: bool = False,
    ) -> str:
        """Save the heads and push them with a model card, in one commit.

        Args:
            repo_id: `user/name`.
            private, revision, create_pr, commit_message, token: see `hub.push.push`.
            base_model, license, benchmark: see `hub.push.prepare_push`.
            with_vocab_matrix: see `save_pretrained`; the matrix is under the target's licence.

        Returns:
            The address of the commit, or of the pull request.

        Raises:
            ValueError: the target has no name that others find it by, or the hub refuses.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, with_vocab_matrix=with_vocab_matrix)
            prepared = prepare_push(
                folder,
                repo_id,
                base_model=base_model,
                license=license,
                benchmark=benchmark,
                with_vocab_matrix=with_vocab_matrix,
            )
            return push(
                prepared,
                private=private,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message,
                token=token,
            )


def _reader(corpus: Corpus, target: TargetModel, **options: Any) -> ReadCorpus:
    """Reads it when it is first asked for."""
    return cache(partial(find_corpus, corpus, target, **options))


def attach(
    model: PreTrainedModel | TargetModel,
    heads: DraftHeads | str | os.PathLike[str],
    **options: Any,
) -> MedusaModel:
    """Heads on a target that is in memory already; the target is not modified.

    Args:
        model: the target.
        heads: in memory, or their checkpoint: a folder, or a hub's repository.
        options: of `MedusaModel`, or of `MedusaModel.from_pretrained`.

    Raises:
        ValueError: the heads are missing, damaged or another target's.
    """
    if isinstance(heads, DraftHeads):
        return MedusaModel(model, heads, **options)
    return MedusaModel.from_pretrained(heads, target=model, **options)
