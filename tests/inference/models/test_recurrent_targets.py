"""The public classes on targets with a recurrent state: every drafter, option and refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, RepetitionPenaltyLogitsProcessor

from medusa_heads import DraftedModel, HeadsConfig, MedusaModel, TrainingFreeModel, new_heads
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.adapt import measure
from medusa_heads.inference.adapt.step_bench import RandomChain, StepBench
from medusa_heads.target import recurrent
from tests.inference.padded import padded
from tests.inference.processor_kinds import Matcher
from tests.inference.recurrent import prompt, repeating, short_target, tiny_target, written
from tests.inference.speaking import make_tokenizer
from tests.pairs import with_slow

KINDS = ("qwen3_next", "falcon_h1", "lfm2")

pytestmark = pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")


STREAM: Any = {"rng": "transformers"}  # whose sampled text is generate()'s own


def with_heads(kind: str, tree: Any = 8, heads: Any = "medusa", **more: Any) -> MedusaModel:
    target = short_target(kind)
    torch.manual_seed(3)
    heads = new_heads(target, HeadsConfig(kind=heads, num_heads=3))
    return MedusaModel(target, heads, tree=tree, **STREAM, **more)


def with_draft(kind: str, tree: str) -> DraftedModel:
    return DraftedModel(short_target(kind), tiny_target("llama"), tree=tree, **STREAM)


WAYS: dict[str, Callable[[str], Any]] = {
    "heads": with_heads,
    "a block": lambda kind: with_heads(kind, heads="block"),
    "heads and text": lambda kind: with_heads(kind, "auto"),
    "eagle3": lambda kind: with_heads(kind, heads="eagle3"),
    "eagle3 and text": lambda kind: with_heads(kind, "auto", "eagle3"),
    "always the same": lambda kind: with_heads(kind, "auto", deterministic=True),
    "text": lambda kind: TrainingFreeModel(short_target(kind), **STREAM),
    "draft model": lambda kind: with_draft(kind, "chain"),
    "drawn": lambda kind: with_draft(kind, "sampled:3"),
    "adaptive": lambda kind: with_draft(kind, "auto"),
}


QUICK = ("heads and text", "text")  # the others as they do, or in batches below


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        # Layers, and heads beside the text, draft in other ways too.
        pytest.param(way, KINDS[i % 3], marks=() if way in QUICK else pytest.mark.slow)
        for i, way in enumerate(WAYS)
    ],
)
def test_every_drafter_is_token_equal(way: str, kind: str, other: bool, cache: Any) -> None:
    """On a text of each kind; which of them is drawn changes from one to the next."""
    model = WAYS[way](kind)
    texts = [prompt(), repeating()]
    is_drawn = (list(WAYS).index(way) % 2 == 0) != other
    for inputs, do_sample in zip(texts, (is_drawn, not is_drawn), strict=True):
        # Of those that draw their drafts the law alone stays where tokens are drawn.
        drawn = do_sample and way not in ("drawn", "adaptive")
        options: Any = {"max_new_tokens": 18}
        options |= {"do_sample": True, "top_k": 20} if drawn else {}
        expected = written(model.target.model, inputs, **options)
        assert torch.equal(written(model, inputs, **options), expected)


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param("heads and text", "lfm2", marks=pytest.mark.slow),
        ("eagle3", "lfm2"),
        ("drawn", "qwen3_next"),
    ],
)
def test_batches_are_token_equal(way: str, kind: str, cache: Any) -> None:
    model, inputs = WAYS[way](kind), padded((4, 0, 7), 24)
    options: Any = {"max_new_tokens": 24}
    expected = written(model.target.model, inputs, **options)
    assert torch.equal(written(model, inputs, **options), expected)


class GoesOn(LogitsProcessor):
    """What stood six tokens before."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(1, input_ids[:, -6:-5], scores.new_full((1, 1), 99.0))


@pytest.mark.parametrize("drafter", ["auto", pytest.param("suffix", marks=pytest.mark.slow)])
def test_text_that_repeats_itself_takes_fewer_steps(drafter: str, cache: Any) -> None:
    model = TrainingFreeModel(short_target("lfm2"), drafter, **STREAM)
    options = {"logits_processor": [GoesOn()], "max_new_tokens": 60}
    expected = written(model.target.model, repeating(), **options)
    assert torch.equal(written(model, repeating(), **options), expected)
    assert model.last_stats.tokens_per_step > 2


def test_drafters_of_branches_are_refused_with_those_of_chains() -> None:
    for drafter in ("recycling", "lookahead+suffix"):
        with pytest.raises(ValueError, match="use one of auto, suffix, early_exit, mtp"):
            TrainingFreeModel(short_target("lfm2"), drafter)


@pytest.mark.parametrize(
    "kind", ["lfm2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2])]
)
def test_processors_and_ends(kind: str) -> None:
    model = with_heads(kind)
    inputs = prompt()
    processors = ([Matcher()], [Matcher()])
    got = written(model, inputs, logits_processor=processors[0])
    assert torch.equal(got, written(model.target.model, inputs, logits_processor=processors[1]))
    penal = {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.4)], "do_sample": True}
    expected = written(model.target.model, inputs, **penal)
    assert torch.equal(written(model, inputs, **penal), expected)
    ending = {"eos_token_id": int(expected[0, 45]), **penal}
    shorter = written(model.target.model, inputs, **ending)
    assert shorter.shape[1] < expected.shape[1]
    assert torch.equal(written(model, inputs, **ending), shorter)


def test_stop_strings_and_streamers() -> None:
    model, inputs, tokenizer = with_heads("qwen3_next"), prompt(), make_tokenizer()
    inputs["input_ids"] %= 90
    options = {"tokenizer": tokenizer, "bad_words_ids": [[i] for i in range(len(tokenizer), 199)]}
    whole = written(model.target.model, inputs, **options)
    options["stop_strings"] = [tokenizer.decode(whole[0, 40:42])]
    expected = written(model.target.model, inputs, **options)
    assert expected.shape[1] < whole.shape[1]

    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    streamer = Streamer()
    assert torch.equal(written(model, inputs, streamer=streamer, **options), expected)
    assert streamer.tokens == [*expected[0].tolist(), -1]


@pytest.mark.parametrize("kind", with_slow(KINDS[2:], KINDS[:2]))
def test_a_text_goes_on_from_its_own_cache(kind: str) -> None:
    model, inputs = with_heads(kind), prompt()
    whole = written(model.target.model, inputs)
    first = written(model, inputs, max_new_tokens=20, return_dict_in_generate=True)
    assert torch.equal(first.sequences, whole[:, :41])
    held = first.past_key_values
    assert held.get_seq_length() <= 40
    rest = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    got = written(model, rest, max_new_tokens=12, past_key_values=held)
    assert torch.equal(got, whole)


def test_a_prompt_is_read_in_parts() -> None:
    model, inputs = with_heads("qwen3_next"), prompt(90)
    expected = written(model.target.model, inputs)
    assert torch.equal(written(model, inputs, prefill_chunk_size=32), expected)


def test_steps_are_measured_with_what_states_take(cache: Any) -> None:
    target = short_target("qwen3_next")
    clock = measure.target_clock(target)
    assert min(clock.step(tokens) for tokens in clock.sizes) > 0


def test_a_measured_step_makes_the_copies_that_a_step_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One where drafts are refused, or accepted before; none where nothing is drafted."""
    copies: list[int] = []
    bench = StepBench(short_target("lfm2"), 8, 1)
    monkeypatch.setattr(recurrent, "_copy", lambda *_: copies.append(len(copies)))
    counts = []
    for drafted in (3, 3, 0, 0):
        before = len(copies)
        bench.time(RandomChain(drafted, 199))
        counts.append(len(copies) - before)
    assert counts == [2, 1, 0, 0]  # the first of its kind warms up


def test_what_is_not_offered_is_one_sentence(cache: Any) -> None:
    model = with_heads("qwen3_next")
    foreign = DynamicCache(config=model.target.model.config)
    text = prompt()
    model.target.model(text["input_ids"][:, :12], past_key_values=foreign, use_cache=True)
    with pytest.raises(ValueError, match="holds recurrent states, which are taken on from this"):
        written(model, text, past_key_values=foreign)
    with pytest.raises(
        UnsupportedArchitecture, match="compressed tokens, which grow with the text"
    ):
        TrainingFreeModel(tiny_target("deepseek_v4"), "suffix", compile=True)
    with pytest.raises(UnsupportedArchitecture, match="drafts would change before"):
        TrainingFreeModel(short_target("qwen3_next"), "early_exit:2")
    with pytest.raises(UnsupportedArchitecture, match="draft with a model of attention layers"):
        DraftedModel(tiny_target("llama"), short_target("qwen3_next"))


@pytest.mark.parametrize(
    ("kind", "phase", "call"),
    [
        (KINDS[(i + call) % len(KINDS)], phase, call)
        for i, phase in enumerate(("drafter.propose", "target.read"))
        for call in (1, 2, 5)
    ],
)
def test_a_callers_own_cache_serves_again_whatever_was_raised(
    cache: Any, monkeypatch: pytest.MonkeyPatch, kind: str, phase: str, call: int
) -> None:
    model = WAYS["heads"](kind)
    owner: Any = model.drafter if phase == "drafter.propose" else model.target
    name = phase.partition(".")[2]
    own, calls = getattr(owner, name), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        calls.append(name)
        if len(calls) == call:
            raise KeyboardInterrupt
        return result

    given: Any = {"past_key_values": model.target.new_cache(), "max_new_tokens": 16}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        written(model, prompt(), **given)
    expected = written(model.target.model, prompt(), max_new_tokens=16)
    assert torch.equal(written(model, prompt(), **given), expected)
