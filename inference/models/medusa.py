"""A target with its heads attached."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.checkpoint import files
from medusa_heads.checkpoint.adapter import load_adapter
from medusa_heads.checkpoint.checkpoint import has_adapter, is_named_adapter, load_heads, save_heads
from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.checkpoint.stored_heads import StoredHeads, read_sidecar
from medusa_heads.files import expanded
from medusa_heads.heads import DraftHeads
from medusa_heads.heads.drafting import for_drafting
from medusa_heads.heads.preview import with_preview
from medusa_heads.hub.carried import carry_along
from medusa_heads.hub.pull import copy_checkpoint, find_checkpoint
from medusa_heads.hub.push import prepare_push, push
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.lookup.corpus_files import Corpus, find_corpus
from medusa_heads.inference.models.assisted import AssistedModel, EngineOptions
from medusa_heads.inference.models.compiling import Compile
from medusa_heads.inference.models.named_target import load_target
from medusa_heads.inference.plan.adaptive import check_tree, heads_drafter
from medusa_heads.inference.plan.trees import TreeSpec
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics

if TYPE_CHECKING:  # heavy to import
    from transformers import PreTrainedModel
    from typing_extensions import Unpack


class MedusaModel(AssistedModel):
    """A target that drafts with its own heads.

    Args:
        target: the causal LM. It is not changed.
        heads: heads that were trained for it.
        statistics: how often each head was right. The best tree of each size follows from them.
        tree: the tree to draft: `"auto"`, `"fastest"`, a number of nodes, `"dynamic:16"`, or a list
            of paths.
        corpus: text to copy from: a file, a folder, a saved index, or lists of token ids.
        deterministic: take the same steps every time, and carry nothing from text to text.
        trust_remote_code: let the tokenizer that reads the corpus run code of its own.
        options: `acceptance`, `acceptance_settings`, `rng`, `compile`, `compile_backend`: see
            AssistedModel.

    `plan/trees.py` lists all words for trees. `"auto"`, `"16+suffix"` and `"suffix"` use a corpus.

    Attributes:
        heads: on the target's device and in its dtype; may be exchanged between two calls.
        drafting: the same weights as drafters read them, on a CPU in eight bits
            or packed where that is faster, and by a preview.

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
        deterministic: bool = False,
        trust_remote_code: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        given: Any = heads
        if not isinstance(given, DraftHeads):
            what = f"expected heads in memory, got {type(heads).__name__}"
            raise ValueError(f"{what}: MedusaModel.from_pretrained(HEADS, target=..) loads them")
        super().__init__(target, heads.config.features, **options)
        self._set_deterministic(deterministic)
        self.heads = heads
        self._attach()
        self._attached = self._as_it_stands()
        self.statistics = statistics
        self._read_corpus = None
        if corpus is not None:  # when it is first asked for
            self._read_corpus = cache(
                lambda: find_corpus(corpus, self.target, trust_remote_code=trust_remote_code)
            )
        # Where the heads were loaded from, and what stood there beside them.
        self.checkpoint: Path | None = None
        self.stored: StoredHeads | None = None
        self.use_tree(tree)

    def _attach(self) -> None:
        target = self.target
        if tuple(self.heads.config.features or ()) != target.features:
            what = "the heads read other layers of the target than those before them"
            raise ValueError(f"{what}: make the decoder anew")
        self.heads.share(target)
        self.heads.to(device=target.device, dtype=target.dtype).eval()
        measured = not self.deterministic
        self.drafting = for_drafting(with_preview(self.heads), measured=measured)

    def _follow_target(self) -> None:
        """What heads share of the target is still where that was, and they are still the same."""
        if self._attached != (now := self._as_it_stands()):
            self._attach()
            self.use_tree(self.tree)
            self._attached = now

    def _as_it_stands(self) -> tuple[object, ...]:
        return self.target.device, self.target.dtype, self.heads

    def use_tree(self, tree: TreeSpec) -> None:
        """Draft this tree from now on; `self.tree` says which it is, also where `auto` chose.

        Raises:
            ValueError: an unknown form, or a tree that does not fit the heads; the one before it
                stays.
        """
        self.tree, self.drafter = self._plan(tree, self.target)

    def _drafter_for(self, target: TargetModel) -> Drafter:
        return self._plan(self.tree, target)[1]

    def _plan(self, tree: TreeSpec, target: TargetModel) -> tuple[TreeSpec, Drafter]:
        return heads_drafter(
            tree,
            target,
            self.drafting,
            self.statistics,
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
        compile: Compile | None = None,
        deterministic: bool = False,
        merge_adapter: bool = False,
        **options: Any,
    ) -> MedusaModel:
        """Load a heads checkpoint and its target, and the adapter they were trained with if any.

        An adapter makes another model of the target: lossless then means the text of the target
        with its adapter. A target that is loaded here gets it; one in memory must carry it.

        Args:
            checkpoint: a folder written by train-heads, or `user/name` or `user/name@revision`.
            target: a model in memory, or a hub id or path. By default the heads name it.
            revision: branch, tag or commit of the heads' repository.
            token, cache_dir, local_files_only: of the hub, for the heads and the target.
            tree, corpus, acceptance, compile, deterministic: see the class.
            merge_adapter: add the adapter to the target's matrices: faster, and in bf16 rounded.
            options: further ones of the class. The rest are for loading the target: `dtype`,
                `device`, `device_map`, `quantization_config`, `trust_remote_code`, ..

        Raises:
            ValueError: checkpoint or target missing, damaged, or not belonging together.
        """
        options |= {
            "tree": tree,
            "corpus": corpus,
            "acceptance": acceptance,
            "compile": compile,
            "deterministic": deterministic,
        }
        own = cls._own_options(options)
        check_tree(tree, acceptance=acceptance, corpus=corpus is not None)  # before loading
        hub = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        folder = find_checkpoint(checkpoint, revision=revision, **hub)  # type: ignore[arg-type]
        view = load_target(folder, target, hub=hub, **options)
        in_memory = target is not None and not isinstance(target, str | os.PathLike)
        adapted = None
        if not in_memory and read_sidecar(folder).get("adapter") is not None:
            adapted = load_adapter(view.model, folder / files.ADAPTER_FOLDER)
        loaded = load_heads(folder, view)
        if merge_adapter:
            if adapted is None:
                raise ValueError(
                    "merge_adapter merges an adapter that is loaded here, and there is none: "
                    "leave it out"
                )
            adapted.merge_and_unload()
        model = cls(view, loaded.heads, **{"statistics": loaded.statistics} | own)
        model.checkpoint, model.stored = folder, replace(loaded.stored, tensors={})
        return model

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, with_vocab_matrix: bool = False
    ) -> Path:
        """Write a checkpoint folder of the heads as they are now, without any weight of the target.

        What came with heads that were loaded goes along: their adapter and, while the heads are as
        they were loaded or rounded, what was measured of them: reports, card, statistics. Of heads
        that were changed since, statistics are stored only if they were given or set since, as
        `statistics`.

        Args:
            folder: receives them: a new one, one of earlier heads, which are replaced, or one of
                other files.
            with_vocab_matrix: lay a copy of the target's vocabulary matrix beside the heads, with
                which vLLM 0.32 reads the folder as it is.

        Raises:
            ValueError: the target carries an adapter that no checkpoint came with, no engine would
                read the matrix, what came with the heads are links that lead elsewhere, or files in
                the folder would be lost: a model's, or some under names that heads use.
            OSError: the folder cannot be written.
        """
        folder, stored = expanded(folder), self.stored
        beside = stored is not None and stored.adapter is not None
        if not beside and has_adapter(self.target) and not is_named_adapter(self.target):
            raise ValueError(
                "the target carries an adapter that these heads were not loaded with: write them "
                "with checkpoint.save_heads(..., adapter=), which stores both"
            )
        with tempfile.TemporaryDirectory() as staging:
            made = Path(staging)
            save_heads(
                made,
                self.heads,
                self.target,
                statistics=self.statistics,
                provenance=provenance() if stored is None else stored.provenance,
                with_vocab_matrix=with_vocab_matrix,
            )
            if stored is not None and self.checkpoint is not None:
                carry_along(self.checkpoint, stored, made, self.target.name_or_path)
            copy_checkpoint(made, folder)
        return folder

    def push_to_hub(
        self,
        repo_id: str,
        *,
        base_model: str | None = None,
        license: str | None = None,
        benchmark: str | os.PathLike[str] | None = None,
        with_vocab_matrix: bool = False,
        **options: Any,
    ) -> str:
        """Save the heads and push them with a model card, in one commit.

        Args:
            repo_id: `user/name`.
            base_model, license, benchmark: see `hub.push.prepare_push`.
            with_vocab_matrix: see `save_pretrained`; the matrix is under the target's licence.
            options: `private`, `revision`, `create_pr`, `commit_message`, `token`: see
                `hub.push.push`.

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
            return push(prepared, **options)


def attach(
    model: PreTrainedModel | TargetModel, heads: DraftHeads | str | os.PathLike[str], **options: Any
) -> MedusaModel:
    """Heads, in memory or of a checkpoint, on a target that is in memory already; it is not
    modified. Options are those of `MedusaModel`, or of `MedusaModel.from_pretrained`.

    Raises:
        ValueError: the heads are missing, damaged or another target's.
    """
    if isinstance(heads, DraftHeads):
        return MedusaModel(model, heads, **options)
    return MedusaModel.from_pretrained(heads, target=model, **options)
