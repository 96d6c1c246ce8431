"""A target with a drafter attached: transformers' `generate()`, several tokens a step."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from medusa_heads.inference.acceptance import RULES, make_rule
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.capability import capability, look_again
from medusa_heads.inference.engine.decoding import decode
from medusa_heads.inference.engine.given.arguments import limited
from medusa_heads.inference.engine.noise import RNGS, Rng
from medusa_heads.inference.engine.running import RunningBatch
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.inference.models import call_options
from medusa_heads.inference.models.compiling import (
    Compile,
    Views,
    check_compile,
    check_one_device,
    compiled_target,
    usual_target,
)
from medusa_heads.inference.models.copying import Copied
from medusa_heads.inference.models.late_compiling import LateCompiling
from medusa_heads.target.graphs.captured import CapturedTarget, as_it_is
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.graphs.text_lock import TextLock
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:  # heavy to import
    from transformers import PreTrainedModel
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    from medusa_heads.inference.endpoint.server import Server


class EngineOptions(TypedDict, total=False):
    """Settings that the classes below AssistedModel hand on to it, which says what they are."""

    acceptance: str
    acceptance_settings: Mapping[str, float] | None
    rng: Rng
    compile: Compile | None
    compile_backend: str | Callable[..., Any]


class AssistedModel(Copied, ABC):
    """What every target with a drafter can do; which drafter, the classes below it say.

    Args:
        target: the causal LM. It is not changed.
        features: layers of it that the drafter reads beside its last hidden state.
        acceptance: `"lossless"`, or a lossy rule: `"typical"`, `"threshold"` or `"log_ratio"`.
        acceptance_settings: of a lossy rule, such as `{"epsilon": 0.09, "delta": 0.3}`.
        rng: what draws sampled tokens under lossless acceptance: `"keyed"`, noise that drafters
            know, by which a seed's text is the same whatever is drafted and in every batch; or
            `"transformers"`, the random stream of generate(), by which it is the text of that.
        compile: run the target through torch.compile. The first text takes longer. `"auto"`
            compiles in the middle of the text in which it has come to pay, if ever. `"steps"`
            compiles whole steps where it can be done. `"capture"` records them as CUDA graphs, or
            scripts forwards on a CPU, without a compiler: by default where it pays. `"kernels"`
            compiles small operations alone for that.
        compile_backend: of torch.compile.

    Attributes:
        drafter: proposes the trees; may be exchanged between two calls.
        last_stats: counts and times of the last call.

    Raises:
        UnsupportedArchitecture: the target cannot be decoded exactly with drafts.
    """

    drafter: Drafter
    deterministic = False  # each text then has a drafter that knows of no other

    def __init__(
        self,
        target: TargetModel | PreTrainedModel,
        features: Sequence[int] | None = None,
        *,
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        rng: Rng = "keyed",
        compile: Compile | None = None,
        compile_backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        _check_options(acceptance, acceptance_settings, rng, compile)
        target = target if isinstance(target, TargetModel) else TargetModel(target)
        self.target = target.with_features(features)
        look_again(self.target)
        self._late: LateCompiling | None = None
        if compile is not None:
            self.target = compiled_target(self.target, compile, compile_backend)
        if compile == "auto" and not isinstance(self.target, CompiledTarget):
            view = partial(CompiledTarget, target.model, compile_backend, self.target.features)
            self._late = LateCompiling(self.target, view, self._drafter_for)
        elif compile is None:
            self.target = usual_target(self.target)
        check_one_device(self.target)
        shared = self.target.lock if isinstance(self.target, CompiledTarget) else None
        self._lock = TextLock(shared, nests=isinstance(self.target, CapturedTarget))
        self._chosen, self._views = compile is None, Views(compile is None)
        self._made = call_options.Made.of(self.target, capability(self.target))
        self._chain_only = self._made.verifies != "tree"
        self.acceptance, self.rng = acceptance, rng
        self.acceptance_settings = dict(acceptance_settings or {})
        self.last_stats = GenerationStats()

    def _set_deterministic(self, wanted: bool) -> None:
        captured = isinstance(self.target, CapturedTarget) and self.target.compiles_parts
        word: Compile = "auto" if self._late else "kernels" if captured else False
        _check_options(compile=word, deterministic=wanted)
        self.deterministic = wanted
        if wanted:  # without what a clock decides about: kernels of recordings, packed matrices
            self._views = Views(may=False)
            target = as_it_is(self.target) if self._chosen else self.target
            self.target = target.without_packed()

    @property
    def lossless(self) -> bool:
        """Whether the acceptance rule leaves the text's law the target's own."""
        return bool(RULES[self.acceptance].lossless)

    def _follow_target(self) -> None:
        """A text begins: the target may have been moved to another device or dtype."""

    @abstractmethod
    def _drafter_for(self, target: TargetModel) -> Drafter:
        """A drafter as this model's own, for a view of its target."""

    @classmethod
    def _own_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Takes out of these what the class itself is told; the rest is for loading a target."""
        names = {
            name
            for each in (cls, AssistedModel)
            for name, parameter in inspect.signature(each).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        own = {name: options.pop(name) for name in names & options.keys()}
        given = inspect.signature(_check_options).parameters.keys() & own.keys()
        _check_options(**{name: own[name] for name in given})  # before seconds of loading
        if own.get("trust_remote_code"):  # of the target as well
            options["trust_remote_code"] = True
        return own

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
        call_options.take_own(kwargs, assistant_model)
        model: Any = self.target.model
        configs = generation_config, model.generation_config
        stopping_criteria = call_options.with_stop_strings(
            stopping_criteria, tokenizer, configs, kwargs
        )
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
            ValueError: called through another model than this one's target, or its vocabulary has
                changed.
        """
        if synced_gpus:
            raise ValueError(call_options.NOT_IN_STEP)
        if model is not self.target.model:
            raise ValueError(
                "this decoder is attached to another model: call generate() on its own target"
            )
        # One text at a time: hidden states are read off the target as it runs.
        with self._lock:
            self._made.check(self.target, len(input_ids))
            self._follow_target()
            self.last_stats = GenerationStats()
            drafter = self._drafter_for(self.target) if self.deterministic else self.drafter
            config = limited(generation_config, stopping_criteria)
            text = self.target, drafter, len(input_ids), config, self.last_stats
            with self._views.of_text(*text, self._drafter_for) as (target, drafter):
                return decode(
                    target,
                    drafter,
                    input_ids,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    generation_config=config,
                    streamer=streamer,
                    acceptance=self.acceptance,
                    acceptance_settings=self.acceptance_settings,
                    rng=self.rng,
                    stats=self.last_stats,
                    exchange=None if self._late is None else self._late.of_text(drafter),
                    **model_kwargs,
                )

    def running_batch(self, max_rows: int = 8, kept_bytes: int = 0) -> RunningBatch:
        """At most so many texts, which begin and end independently of one another. Keys and values
        of ended ones are kept for prompts that begin alike, so many bytes of them at most, unless
        the model is deterministic: rounded, they tell of how they came about. Raises ValueError:
        the model is compiled, or samples by the random stream of generate()."""
        if self.rng != "keyed":
            raise ValueError(
                "by rng='transformers' a text depends on those beside it: rows that come and go "
                "want rng='keyed'"
            )
        with self._lock:
            self._made.check(self.target, max_rows)
            self._follow_target()
        drafter = self.drafter
        target = as_it_is(self.target) if self._chosen else self.target  # rows come and go
        if self.deterministic or target is not self.target:
            drafter = self._drafter_for(target)
        return RunningBatch(
            target,
            drafter,
            max_rows,
            acceptance=self.acceptance,
            acceptance_settings=self.acceptance_settings,
            lock=self._lock,
            kept_bytes=0 if self.deterministic else kept_bytes,
        )

    def server(self, tokenizer: Any = None, **options: Any) -> Server:
        """What answers requests for completions by HTTP, while it is entered (`with`) or run.

        Args:
            tokenizer: of the target; by default loaded from where that came from.
            options: `host`, `port`, `max_rows`, `queue`, ..: see `endpoint.server.Server`.

        Raises:
            ValueError: the extra `serve` is not installed, or see Server.
        """
        return find_server()(self, tokenizer, **options)

    def serve(self, tokenizer: Any = None, **options: Any) -> None:
        """Answer requests until SIGINT or SIGTERM; arguments and errors are those of `server`."""
        self.server(tokenizer, **options).run()


def find_server() -> type[Server]:
    """The class of servers. Raises ValueError: the extra `serve` is not installed."""
    try:
        from medusa_heads.inference.endpoint.server import Server
    except ModuleNotFoundError as error:
        raise ValueError(f"serving needs {error.name}: pip install starlette uvicorn") from error
    return Server


def _check_options(
    acceptance: str = "lossless",
    acceptance_settings: Mapping[str, float] | None = None,
    rng: Rng = "keyed",
    compile: Compile | None = None,
    deterministic: bool = False,
) -> None:
    """Raises ValueError: one of these is none, or does not go with another."""
    check_compile(compile, deterministic)
    if rng not in RNGS:
        raise ValueError(f"rng must be one of {list(RNGS)}, got {rng!r}")
    make_rule(acceptance, LogitsProcessorList(), False, **(acceptance_settings or {}))
