"""The flags of all verbs that decode, and what they are for a model and for generate()."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

ACCEPTANCE_SETTINGS = ("epsilon", "delta", "threshold", "tau")
# Options of generate() that only sampling reads: whoever gives one wants to sample.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
NOT_UTF8 = "the prompt is not UTF-8 text: give it as UTF-8"
PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")


@dataclass
class ModelArguments:
    """Which heads, on which target, where."""

    checkpoint: str = field(
        metadata={
            "help": "Heads checkpoint: a folder written by train-heads, or a repository on a hub "
            "as user/name or user/name@revision."
        }
    )
    target: str | None = field(
        default=None,
        metadata={"help": "Hub id or path of the target. Default: the one the heads name."},
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto",
        metadata={"help": "Dtype of the target; auto: the fastest here that holds it exactly."},
    )
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda. Default: the best there is."}
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Run the Python code that comes with the target. It wants --target too."},
    )


@dataclass
class DecodingArguments(ModelArguments):
    """How to decode, with the options of transformers' generate() under their own names."""

    tree: str = field(
        default="auto",
        metadata={
            "help": "Which tokens are drafted at a step. With heads: auto, N, static:N, dynamic:N, "
            "none, chain, cartesian:A,B,.., FILE.json, one of them +suffix, or suffix. With a "
            "draft model: auto, chain:N, dynamic:N, sampled:N or sampled:AxBx.."
        },
    )
    drafter: str | None = field(
        default=None,
        metadata={
            "help": "Draft without training: auto, suffix, recycling, lookahead, "
            "lookahead+suffix, early_exit, early_exit+suffix, or early_exit:N with the first N "
            "layers. The first argument is then the target itself."
        },
    )
    draft_model: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Draft with this language model (a hub id or a folder), or with the fastest of "
            "several. The first argument is then the target itself.",
            "action": "extend",
        },
    )
    corpus: str | None = field(
        default=None,
        metadata={
            "help": "File or folder of text that the target may repeat. Drafts that continue the "
            "text's own end (auto, suffix, +suffix) then continue this text too. Indexed once."
        },
    )
    acceptance: Literal["lossless", "typical", "threshold", "log_ratio"] = field(
        default="lossless",
        metadata={"help": "Rule that accepts drafts: lossless, or one that changes the text."},
    )
    epsilon: float | None = field(default=None, metadata={"help": "Epsilon of typical acceptance."})
    delta: float | None = field(default=None, metadata={"help": "Delta of typical acceptance."})
    threshold: float | None = field(
        default=None, metadata={"help": "Threshold of threshold acceptance."}
    )
    tau: float | None = field(default=None, metadata={"help": "Tau of log_ratio acceptance."})
    compile: bool = field(
        default=False, metadata={"help": "Verify through torch.compile; the first text is slow."}
    )
    deterministic: bool = field(
        default=False,
        metadata={
            "help": "Verify as many nodes in every step and learn from no earlier text, so that "
            "bfloat16 rounds every time alike. It does not go with --draft_model."
        },
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Most tokens that are generated."})
    do_sample: bool = field(
        default=False,
        metadata={"help": "Sample; implied by temperature, top_k, top_p, min_p and typical_p."},
    )
    temperature: float | None = field(default=None, metadata={"help": "Sampling temperature."})
    top_k: int | None = field(default=None, metadata={"help": "Sample from the k likeliest."})
    top_p: float | None = field(
        default=None, metadata={"help": "Sample from the likeliest tokens that add up to this."}
    )
    min_p: float | None = field(
        default=None, metadata={"help": "Sample tokens this times as probable as the likeliest."}
    )
    typical_p: float | None = field(
        default=None, metadata={"help": "Sample from the most typical tokens that add up to this."}
    )
    repetition_penalty: float | None = field(
        default=None, metadata={"help": "Divide the logits of earlier tokens by this; 1.0: off."}
    )
    no_repeat_ngram_size: int | None = field(
        default=None, metadata={"help": "Never repeat a sequence of this many tokens."}
    )
    stop: list[str] = field(
        default_factory=list,
        metadata={"help": "Stop behind this string; may be given again.", "action": "extend"},
    )
    seed: int = field(default=0, metadata={"help": "Seed of sampling."})
    group: bool = field(
        default=False,
        metadata={"help": "Show which tokens came in one step: by colour, or in [brackets]."},
    )
    stats: bool = field(default=False, metadata={"help": "Print counts and times afterwards."})


def decoder_options(arguments: DecodingArguments) -> dict[str, Any]:
    """What the model is built with: tree or drafter, corpus, the acceptance rule, compiled or not.

    Raises:
        ValueError: both a tree and a drafter.
    """
    given = {name: getattr(arguments, name) for name in ACCEPTANCE_SETTINGS}
    drafts = {"tree": arguments.tree}
    if arguments.drafter is not None:
        if arguments.tree != "auto":
            raise ValueError("a tree is of heads or a draft model, with --drafter there is neither")
        drafts = {"drafter": arguments.drafter}
    if arguments.corpus is not None:
        drafts["corpus"] = arguments.corpus
    return {
        **drafts,
        "compile": arguments.compile,
        "deterministic": arguments.deterministic,
        "acceptance": arguments.acceptance,
        "acceptance_settings": {name: value for name, value in given.items() if value is not None},
    }


def generation_options(arguments: DecodingArguments, tokenizer: Any) -> dict[str, Any]:
    """The options that were given, as generate() names them.

    Raises:
        ValueError: a value that generate() itself would ignore without a word.
    """
    for name in ("top_p", "typical_p"):
        share = getattr(arguments, name)
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1, got {share}")
    for name in (*SAMPLING, *PENALTIES):
        if not math.isfinite(getattr(arguments, name) or 0):
            raise ValueError(f"{name} must be a finite number, got {getattr(arguments, name)}")
    if not -(2**63) <= arguments.seed < 2**64:
        raise ValueError(f"seed must be a number of 64 bits, got {arguments.seed}")
    if "" in arguments.stop:
        raise ValueError("a stop string must not be empty: every text ends in it")
    if (arguments.no_repeat_ngram_size or 0) < 0:
        raise ValueError(
            f"no_repeat_ngram_size must be at least 0, got {arguments.no_repeat_ngram_size}"
        )
    chosen = {
        name: getattr(arguments, name)
        for name in SAMPLING + PENALTIES
        if getattr(arguments, name) is not None
    }
    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": arguments.do_sample or bool(set(SAMPLING) & set(chosen)),
        **chosen,
    }
    if arguments.stop:
        options |= {"stop_strings": arguments.stop, "tokenizer": tokenizer}
    return options


def check_encodable(text: str) -> None:
    """Raises ValueError where bytes that are not UTF-8 were taken for text, as Python takes those
    of a command line or of standard input."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{NOT_UTF8} (from its character {error.start + 1} on)") from None
