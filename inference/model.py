"""A target with its heads attached: transformers' `generate()`, several tokens a step."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)

from medusa_heads.checkpoint import load_heads, read_sidecar
from medusa_heads.compiled import CompiledTarget
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.acceptance import make_rule
from medusa_heads.inference.capability import capability
from medusa_heads.inference.engine import decode
from medusa_heads.inference.stats import GenerationStats
from medusa_heads.inference.tree_plan import TreeSpec, make_drafter
from medusa_heads.inference.tree_size import best_tree
from medusa_heads.statistics import HeadStatistics
from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.utils import GenerateDecoderOnlyOutput

UNMEASURED_TREE = "chain"  # heads without statistics: nothing says where branches would pay


class MedusaModel:
    """A target that drafts for itself.

    Args:
        target: the causal LM; it is not modified.
        heads: heads that fit it.
        statistics: measured ranks of the heads, from which the best tree of a size is built.
        tree: which tree to draft, in the words of tree_plan.py: `"auto"`, a number of nodes,
            `"dynamic:16"`, .., or the tree itself as a list of rank paths.
        acceptance: `"lossless"`, or a lossy rule: `"typical"`, `"threshold"`, `"log_ratio"`.
        acceptance_settings: of a lossy rule, such as `{"epsilon": 0.09, "delta": 0.3}`.
        compile: verify through torch.compile: one graph over a cache of fixed size, replayed as a
            CUDA graph on a GPU. The first text takes the seconds of compiling.
        compile_backend: of torch.compile.

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
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        compile_backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self.target = target if isinstance(target, TargetModel) else TargetModel(target)
        if compile and not isinstance(self.target, CompiledTarget):
            self.target = CompiledTarget(self.target.model, compile_backend)
        devices = set((getattr(self.target.model, "hf_device_map", None) or {}).values())
        if len(devices) > 1:
            raise UnsupportedArchitecture(
                f"the target is spread over {sorted(map(str, devices))}, heads follow one device",
                "load it on one device, without device_map",
            )
        self._lock = Lock()
        self._chain_only = capability(self.target) == "chain"
        heads.share(self.target)
        self.heads = heads.to(device=self.target.device, dtype=self.target.dtype).eval()
        self.statistics = statistics
        self.acceptance = acceptance
        self.acceptance_settings = dict(acceptance_settings or {})
        make_rule(acceptance, LogitsProcessorList(), False, **self.acceptance_settings)
        self.use_tree(tree)
        self.last_stats = GenerationStats()

    def use_tree(self, tree: TreeSpec) -> None:
        """Draft this tree from now on; `self.tree` says which it is, also where `auto` chose.

        Raises:
            ValueError: an unknown form, or a tree that does not fit the heads.
        """
        if tree == "auto":
            tree = UNMEASURED_TREE
            if self.statistics is not None and not self._chain_only:
                tree = best_tree(self.target, self.heads, self.statistics)
        self.tree = tree
        self.drafter = make_drafter(
            tree,
            self.heads,
            self.statistics,
            chain_only=self._chain_only,
            with_log_probs=self.acceptance in ("threshold", "log_ratio"),
        )

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | os.PathLike[str],
        *,
        target: str | TargetModel | PreTrainedModel | None = None,
        tree: TreeSpec = "auto",
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        **target_kwargs: Any,
    ) -> MedusaModel:
        """Load a heads checkpoint and its target.

        Args:
            checkpoint: folder written by train-heads.
            target: a model in memory, or a hub id or path; by default the one the heads name.
            tree, acceptance, acceptance_settings, compile: see the class.
            target_kwargs: passed on when the target is loaded, such as `dtype` or `device_map`.

        Raises:
            ValueError: checkpoint or target missing, damaged, or not belonging together.
        """
        if target is None:
            target = _named_target(checkpoint)
        if isinstance(target, str | os.PathLike):
            target = TargetModel.from_pretrained(str(target), **target_kwargs)
        elif target_kwargs:
            raise ValueError(
                f"{sorted(target_kwargs)} apply to a target that is loaded here, but one in memory "
                "was given: leave them out"
            )
        view = target if isinstance(target, TargetModel) else TargetModel(target)
        loaded = load_heads(checkpoint, view)
        return cls(
            view,
            loaded.heads,
            statistics=loaded.statistics,
            tree=tree,
            acceptance=acceptance,
            acceptance_settings=acceptance_settings,
            compile=compile,
        )

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        *,
        assistant_model: Any = None,
        streamer: Any = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """transformers' `generate()`: its arguments, its return types, the same tokens.

        Raises:
            ValueError: an option that tree decoding cannot honour, by name.
        """
        if assistant_model is not None:
            raise ValueError("the heads are the drafter here: leave assistant_model out")
        model: Any = self.target.model
        # generate() hands neither streamer nor tokenizer to a custom decoding method: the one is
        # bound below, the other is needed for stop strings alone.
        strings = _stop_strings(kwargs, generation_config, model.generation_config)
        if strings:
            if tokenizer is None:
                raise ValueError("stop_strings need the tokenizer: pass tokenizer= as well")
            stopping_criteria = StoppingCriteriaList(stopping_criteria or [])
            stopping_criteria.append(StopStringCriteria(tokenizer, strings))
            generation_config = copy.deepcopy(generation_config or model.generation_config)
            generation_config.stop_strings = None
        return model.generate(
            inputs,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            custom_generate=partial(self.decode, streamer=streamer),
            **kwargs,
        )

    def decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """The decoding method for transformers' own door:
        `target.generate(**inputs, custom_generate=model.decode)`.

        Raises:
            ValueError: called through another model than this one's target.
        """
        if synced_gpus:
            raise ValueError("tree decoding does not keep sharded processes in step: gather first")
        if model is not self.target.model:
            raise ValueError(
                "these heads are attached to another model: call generate() on their own target"
            )
        # One text at a time: hidden states are read off the target as it runs.
        with self._lock:
            self.last_stats = GenerationStats()
            return decode(
                self.target,
                self.drafter,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                acceptance=self.acceptance,
                acceptance_settings=self.acceptance_settings,
                stats=self.last_stats,
                **model_kwargs,
            )


def _stop_strings(
    kwargs: dict[str, Any], given: GenerationConfig | None, default: GenerationConfig
) -> str | list[str] | None:
    if "stop_strings" in kwargs:
        named: str | list[str] | None = kwargs.pop("stop_strings")
        return named
    return (given or default).stop_strings


def _named_target(checkpoint: str | os.PathLike[str]) -> str:
    name = (read_sidecar(checkpoint).get("target") or {}).get("name_or_path")
    if not name:
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r} does not name its target: pass target="
        )
    # A relative path was relative to where training ran; try it from the checkpoint as well.
    beside = Path(checkpoint) / name
    return str(beside) if not Path(name).exists() and beside.exists() else name
