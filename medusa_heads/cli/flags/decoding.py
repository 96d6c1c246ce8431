"""The flags of all verbs that decode, and what they are for a model and for generate()."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from medusa_heads.files import half_character
from medusa_heads.settings import above_zero, at_least, flag
from medusa_heads.shared_flags import LoadingFlags

ACCEPTANCE_SETTINGS = ("epsilon", "delta", "threshold", "tau")
# Options of generate() that only sampling reads: whoever gives one wants to sample.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
NOT_UTF8 = "the prompt is not UTF-8 text: give it as UTF-8"
PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")


@dataclass
class ModelArguments(LoadingFlags):
    """Which heads, on which target, where."""

    checkpoint: str = flag(
        MISSING,
        "Heads checkpoint: a folder written by train-heads, or a repository on a hub as user/name "
        "or user/name@revision.",
    )
    target: str | None = flag(None, "Hub id or path of the target. Default: that of the heads.")


@dataclass
class MeasureArguments(ModelArguments):
    """The same, of verbs that keep what they measured."""

    refresh: bool = flag(False, "Measure anew, whatever was measured earlier.")


@dataclass
class DraftingArguments(ModelArguments):
    """What is drafted, and what is kept of it."""

    tree: str = flag(
        "auto",
        "Which tokens are drafted at a step. With heads: auto, fastest, N, static:N, dynamic:N, "
        "none, chain, cartesian:A,B,.., FILE.json, one of them +suffix, or suffix. With a draft "
        "model: auto, chain:N, dynamic:N, sampled:N or sampled:AxBx..",
    )
    drafter: str | None = flag(
        None,
        "Draft without training: auto, suffix, recycling, recycling:N with N tokens at every step, "
        "lookahead, lookahead+suffix, "
        "early_exit, early_exit+suffix, early_exit:N with the first N layers, or mtp, mtp+suffix "
        "with the multi-token-prediction modules of the target's own checkpoint. The first "
        "argument is then the target itself.",
    )
    draft_model: list[str] = flag(
        [],
        "Draft with this language model (a hub id or a folder), or with the fastest of several. "
        "The first argument is then the target itself.",
        action="extend",
    )
    corpus: str | None = flag(
        None,
        "File or folder of text that the target may repeat. Drafts that continue the text's own "
        "end (auto, suffix, +suffix) then continue this text too. Indexed once.",
    )
    acceptance: Literal["lossless", "typical", "threshold", "log_ratio"] = flag(
        "lossless", "Rule that accepts drafts: lossless, or one that changes the text."
    )
    epsilon: float | None = flag(None, "Epsilon of typical acceptance. Default: 0.09.")
    delta: float | None = flag(None, "Delta of typical acceptance. Default: 0.3.")
    threshold: float | None = flag(None, "Threshold of threshold acceptance. Default: 0.5.")
    tau: float | None = flag(None, "Tau of log_ratio acceptance. Default: 1.")
    deterministic: bool = flag(
        False,
        "Verify as many nodes in every step and learn from no earlier text, so that bfloat16 "
        "rounds every time alike. It does not go with --draft_model.",
    )


@dataclass
class DecodingArguments(DraftingArguments):
    """How to decode, with the options of transformers' generate() under their own names."""

    rng: Literal["keyed", "transformers"] = flag(
        "keyed",
        "What draws sampled tokens: keyed noise, which drafters know; or transformers' own random "
        "stream, for the text of generate() with that seed.",
    )
    compile: bool = flag(False, "Verify through torch.compile; the first text is slow.")
    compile_late: bool = flag(
        False, "Compile in the middle of the text in which it has come to pay, if ever."
    )
    compile_steps: bool = flag(
        False, "Compile whole steps, drafting too: for GPUs, the first text is slower still."
    )
    compile_kernels: bool = flag(
        False, "On a GPU, compile small operations alone and record steps: within a minute."
    )
    capture: bool = flag(
        True, "Where nothing is compiled: on a GPU record steps, on a CPU script forwards."
    )
    max_new_tokens: int = flag(128, "Most tokens that are generated.")
    do_sample: bool = flag(False, "Sample; so do temperature, top_k, top_p, min_p and typical_p.")
    temperature: float | None = flag(None, "Sampling temperature.")
    top_k: int | None = flag(None, "Sample from the k likeliest.")
    top_p: float | None = flag(None, "Sample from the likeliest tokens that add up to this.")
    min_p: float | None = flag(None, "Sample tokens this times as probable as the likeliest.")
    typical_p: float | None = flag(None, "Sample from the most typical tokens that add up to this.")
    repetition_penalty: float | None = flag(
        None, "Divide earlier tokens' logits by this; 1.0: off."
    )
    no_repeat_ngram_size: int | None = flag(None, "Never repeat a sequence of this many tokens.")
    stop: list[str] = flag([], "Stop behind this string; may be given again.", action="extend")
    seed: int = flag(0, "Seed of sampling.")
    group: bool = flag(False, "Show which tokens came in one step: by colour, or in [brackets].")
    stats: bool = flag(False, "Print counts and times afterwards.")


def decoder_options(arguments: DraftingArguments) -> dict[str, Any]:
    """What the model is built with: tree or drafter, corpus, acceptance rule, compiled or not."""
    drafts: dict[str, Any] = {"tree": arguments.tree}
    if arguments.drafter is not None:
        if arguments.tree != "auto":
            raise ValueError("a tree is of heads or a draft model, with --drafter there is neither")
        drafts = {"drafter": arguments.drafter}
    if arguments.corpus is not None:
        drafts["corpus"] = arguments.corpus
    if isinstance(arguments, DecodingArguments):
        drafts["compile"] = _compile(arguments)
        drafts["rng"] = arguments.rng
    return {
        **drafts,
        "deterministic": arguments.deterministic,
        "acceptance": arguments.acceptance,
        "acceptance_settings": _given(arguments, ACCEPTANCE_SETTINGS),
    }


def _compile(arguments: DecodingArguments) -> Any:
    asked = [
        (arguments.compile, "--compile", True),
        (arguments.compile_late, "--compile_late", "auto"),
        (arguments.compile_steps, "--compile_steps", "steps"),
        (arguments.compile_kernels, "--compile_kernels", "kernels"),
    ]
    given = [(name, value) for wanted, name, value in asked if wanted]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(name for name, _ in given)} exclude each other: give one")
    return given[0][1] if given else None if arguments.capture else False


def generation_options(arguments: DecodingArguments, tokenizer: Any) -> dict[str, Any]:
    """The options that were given, as generate() names them."""
    chosen = _given(arguments, SAMPLING + PENALTIES)
    for name in ("top_p", "typical_p"):
        if not 0 < chosen.get(name, 1) <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1, got {chosen[name]}")
    if not 0 <= chosen.get("min_p", 0) <= 1:
        raise ValueError(f"min_p must be at least 0 and at most 1, got {chosen['min_p']}")
    for name, value in chosen.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
    if chosen.get("temperature", 1) <= 0:
        raise ValueError(
            f"temperature must be above 0, got {chosen['temperature']}: leave sampling off for the "
            f"likeliest tokens, that is do_sample, {', '.join(SAMPLING[:-1])} and {SAMPLING[-1]}"
        )
    above_zero(arguments, "repetition_penalty")
    at_least(arguments, 1, "max_new_tokens")
    if not -(2**63) <= arguments.seed < 2**64:
        raise ValueError(f"seed must be a number of 64 bits, got {arguments.seed}")
    if "" in arguments.stop:
        raise ValueError("a stop string must not be empty: every text ends in it")
    at_least(arguments, 0, "top_k", "no_repeat_ngram_size")
    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": arguments.do_sample or bool(set(SAMPLING) & set(chosen)),
        "tokenizer": tokenizer,  # the target's own settings may name strings to stop at
        **chosen,
    }
    return options | ({"stop_strings": arguments.stop} if arguments.stop else {})


def _given(arguments: DraftingArguments, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check_encodable(text: str) -> None:
    """Raises ValueError where bytes that are not UTF-8 were taken for text, as Python takes those
    of a command line or of standard input."""
    if (place := half_character(text)) is not None:
        raise ValueError(f"{NOT_UTF8} (from its character {place + 1} on)")
