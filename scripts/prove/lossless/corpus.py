"""The texts of each target: greedy and sampled, alone and in batches, under every processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from scripts.prove.lossless.targets import DEMO, PROCESSORS, ProofTarget
from scripts.prove.lossless.texts import Options, OwnDraws, Text
from tests.inference.processor_kinds import kinds

BATCH = 8
SPREAD = 2.0  # of the logits that random targets' tokens are drawn from, at a temperature of 1
# Of random targets; of the demo's, whose text is no noise, rows end where it ends a function.
ENDS = {DEMO: [0, 199], "": [5, 50, 100]}

WARPERS: dict[str, Options] = {
    "temperature 0.7": {"temperature": 0.7, "top_k": 0},
    "temperature 1.5": {"temperature": 1.5, "top_k": 0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "top_k": 0},
    "min-p": {"min_p": 0.1, "top_k": 0},
    "typical": {"typical_p": 0.8, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.01, "top_k": 0},
    "eta": {"eta_cutoff": 0.01, "top_k": 0},
    "several warpers": {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.02},
}
# Beside those that the engine's own tests have.
FURTHER: dict[str, Options] = {
    "least length": {"min_new_tokens": 12, "eos_token_id": [3, 7, 11]},
    "least length, prompt included": {"min_length": 40, "eos_token_id": [3, 7, 11]},
    "bad words": {"bad_words_ids": [[5], [9, 10], [4, 6, 8]]},
    "tokens suppressed": {"suppress_tokens": [2, 12, 20]},
    "tokens suppressed at the beginning": {"begin_suppress_tokens": [2, 12, 13, 14, 20]},
    "forced end": {"forced_eos_token_id": 7, "eos_token_id": 7},
    "length penalty": {"exponential_decay_length_penalty": (6, 1.2), "eos_token_id": 7},
    "no NaN": {"remove_invalid_values": True, "renormalize_logits": True},
}
READ_NO_TEXT = {
    "none", "bias", "guidance", "by place in the batch", "tokens suppressed", "no NaN",
    "guidance against a prompt a row", "calls counted, in place", "allowed tokens",
    "least length", "least length, prompt included", "forced end", "length penalty",
    "tokens suppressed at the beginning", "penalty of a text a row", "several", "bad words",
}  # fmt: skip
BY_ROW = {
    "penalty of a text a row", "n-grams of a text a row", "guidance against a prompt a row",
    "allowed tokens", "by place in the batch",
}  # fmt: skip


def texts(target: ProofTarget, turn: int, seed: int, new_tokens: int) -> Iterator[Text]:
    """What is decoded on a target; of sampled batches, which have two kinds, a random target has
    one in turn."""
    if target.name == PROCESSORS:
        yield from processed(target, seed, new_tokens)
        return
    if target.name == DEMO:
        yield from usual(target, "demo", seed, new_tokens * 4 // 3)
        return
    for text in usual(target, "architectures", seed, new_tokens):
        if not (text.own_draws if turn % 2 else text.in_step and text.batch > 1):
            yield text


def usual(target: ProofTarget, family: str, seed: int, new_tokens: int) -> Iterator[Text]:
    """Greedy and sampled, alone and, of a target that verifies trees, in batches."""
    warped = list(WARPERS.values())[seed % len(WARPERS)]
    if target.name != DEMO:
        # So that the text decides what is drawn, and a broken engine shows.
        warped = warped | {"temperature": warped.get("temperature", 1.0) * target.spread / SPREAD}
    ends = {"eos_token_id": ENDS.get(target.name, ENDS[""])}

    def text(name: str, batch: int, options: Callable[[], Options], **kind: Any) -> Text:
        return Text(
            name,
            f"{family}: {name}",
            target.prompts(batch, seed),
            lambda: {**target.options, **options()},
            new_tokens,
            seed=seed,
            **kind,
        )

    yield text("greedy", 1, lambda: {"do_sample": False})
    yield text("sampled, same seed", 1, lambda: {"do_sample": True, **warped})
    if not target.batches:
        return
    yield text("greedy, batch of 8", BATCH, lambda: {"do_sample": False, **ends})
    yield text(
        "sampled, same seed, batch of 8 in step",
        BATCH,
        lambda: {"do_sample": True, **warped},
        in_step=True,
    )
    yield text(
        "sampled, batch of 8, each row its own draws",
        BATCH,
        lambda: {"do_sample": True, "top_k": 0, **ends, **_own_draws(seed, target)},
        by_row=True,
        reads_text=True,
    )


def _own_draws(seed: int, target: ProofTarget) -> Options:
    temperature = 0.8 if target.name == DEMO else 0.8 * target.spread / SPREAD
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(0.95)]
    return {"logits_processor": LogitsProcessorList([OwnDraws(seed, LogitsProcessorList(warpers))])}


def processed(target: ProofTarget, seed: int, new_tokens: int) -> Iterator[Text]:
    """Under every logits processor and warper, in batches of 1, 2 and 4."""
    made = kinds() | {name: _always(options) for name, options in FURTHER.items()}
    warpers = {name: _always(options) for name, options in WARPERS.items()}
    for batch in (1, 2, 4):
        inputs = target.prompts(batch, seed)
        for name, make in made.items():
            yield Text(
                f"{name}, greedy, batch of {batch}",
                f"processors: greedy, batch of {batch}",
                inputs,
                partial(_with, False, make, batch),
                new_tokens,
                seed=seed,
                reads_text=name not in READ_NO_TEXT,
                by_row=name in BY_ROW and batch > 1,
            )
        for name, make in (warpers | made if batch == 1 else warpers).items():
            yield Text(
                f"{name}, sampled, batch of {batch}",
                f"processors: sampled, same seed, batch of {batch}",
                inputs,
                partial(_with, True, make, batch),
                new_tokens,
                seed=seed,
                in_step=True,
                reads_text=name in made and name not in READ_NO_TEXT,
            )


def _with(drawn: bool, make: Callable[[int], Options], batch: int) -> Options:
    return {"do_sample": drawn, **make(batch)}


def _always(options: Options) -> Callable[[int], Options]:
    return lambda batch: options
