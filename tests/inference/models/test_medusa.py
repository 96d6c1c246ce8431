"""MedusaModel: transformers' generate() with heads attached."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel, new_heads
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.inference.drafters.head_trees import MedusaDrafter
from medusa_heads.trees.statistics import HeadStatistics
from tests.conftest import TinyLlama
from tests.inference.conftest import INPUTS, plain


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten().tolist())
        assert not value.is_inference()  # or nobody could learn from what was written

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}])
def test_equal_to_generate_through_both_doors(streaming: MedusaModel, options: Any) -> None:
    torch.manual_seed(5)
    expected = plain(streaming, max_new_tokens=28, **options)
    torch.manual_seed(5)
    got: Any = streaming.generate(**INPUTS, max_new_tokens=28, **options)
    assert torch.equal(got, expected)
    assert streaming.last_stats.tokens == 28
    assert streaming.last_stats.steps < 50
    assert set(streaming.last_stats.seconds) == {"prefill", "draft", "target", "walk", "cache"}
    torch.manual_seed(5)
    through = plain(streaming, max_new_tokens=28, custom_generate=streaming.decode, **options)
    assert torch.equal(through, expected)


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5, 7])
def test_length_is_exact(medusa: MedusaModel, new_tokens: int) -> None:
    out: Any = medusa.generate(**INPUTS, max_new_tokens=new_tokens, do_sample=False)
    assert out.shape == (1, 12 + new_tokens)


def test_streamer_sees_prompt_then_every_token(medusa: MedusaModel) -> None:
    streamer = Collector()
    out: Any = medusa.generate(**INPUTS, max_new_tokens=20, do_sample=False, streamer=streamer)
    assert streamer.pieces[0] == INPUTS["input_ids"][0].tolist()
    assert [token for piece in streamer.pieces for token in piece] == out[0].tolist()
    assert streamer.ended


class BanToken(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, int(input_ids[0, -1])] = -float("inf")
        return scores


def test_users_own_processors_and_criteria(medusa: MedusaModel) -> None:
    own: Any = {
        "logits_processor": LogitsProcessorList([BanToken()]),
        "stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(600)]),
    }
    expected = plain(medusa, max_new_tokens=40, do_sample=False, **own)
    got: Any = medusa.generate(**INPUTS, max_new_tokens=40, do_sample=False, **own)
    assert torch.equal(got, expected)


def test_checkpoint_with_its_target_by_path(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=24)
    model.save_pretrained(tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"))
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    statistics = HeadStatistics.from_ranks(torch.tensor([[0, 0], [0, 1], [1, 0], [2, 0]]))
    save_heads(tmp_path / "heads", heads, target, statistics=statistics)
    loaded = MedusaModel.from_pretrained(tmp_path / "heads", tree=4)
    assert isinstance(loaded.drafter, MedusaDrafter)
    assert loaded.drafter.shape.choices == [(0,), (0, 0), (1,), (2,)]
    assert torch.equal(
        loaded.generate(**INPUTS, max_new_tokens=20, do_sample=False),  # type: ignore[arg-type]
        model.generate(**INPUTS, max_new_tokens=20, do_sample=False),
    )
    with pytest.raises(ValueError, match="another target"):
        MedusaModel.from_pretrained(tmp_path / "heads", target=tiny_llama(vocab_size=24, seed=3))
    with pytest.raises(ValueError, match="leave them out"):
        MedusaModel.from_pretrained(tmp_path / "heads", target=model, dtype="auto")


def test_trees_that_do_not_fit_are_refused(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=2))
    with pytest.raises(ValueError, match="3 levels deep"):
        MedusaModel(model, heads, tree=[(0,), (0, 0), (0, 0, 0)])
    with pytest.raises(ValueError, match="rank 199 of 199"):
        MedusaModel(model, heads, tree=[(199,)])
    with pytest.raises(ValueError, match="another model"):
        MedusaModel(model, heads).decode(tiny_llama(), *[None] * 4)  # type: ignore[arg-type]


def test_scores_and_logits_as_generate_returns_them(streaming: MedusaModel) -> None:
    options: Any = {
        "max_new_tokens": 30,
        "do_sample": True,
        "temperature": 0.7,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    torch.manual_seed(5)
    expected = plain(streaming, **options)
    torch.manual_seed(5)
    got: Any = streaming.generate(**INPUTS, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        mine, theirs = torch.cat(getattr(got, name)), torch.cat(getattr(expected, name))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    pair = {name: tensor.repeat(2, 1) for name, tensor in INPUTS.items()}
    with pytest.raises(ValueError, match="batch of 1"):
        streaming.generate(**pair, **options)


def test_streamers_learn_where_steps_end(medusa: MedusaModel) -> None:
    class Groups(Collector):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[int] = []

        def end_step(self) -> None:
            self.ends.append(len(self.pieces) - 1)

    streamer = Groups()
    medusa.generate(**INPUTS, max_new_tokens=20, do_sample=False, streamer=streamer)
    assert len(streamer.ends) == medusa.last_stats.steps
    assert streamer.ends[-1] == 20
    assert streamer.ends == sorted(set(streamer.ends))


def test_iterator_streamer(medusa: MedusaModel) -> None:
    """The iterator form: generation in a thread, text read from the outside."""
    tokenizer = letters()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options: Any = {"max_new_tokens": 20, "do_sample": False, "streamer": streamer}
    thread = Thread(target=medusa.generate, kwargs={**INPUTS, **options})
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = plain(medusa, max_new_tokens=20, do_sample=False)[0, 12:]
    assert text == tokenizer.decode(expected)


def letters() -> PreTrainedTokenizerFast:
    """A vocabulary of the 24 letters a to x."""
    vocabulary = {chr(ord("a") + i): i for i in range(24)}
    single = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    single.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=single)


@pytest.mark.parametrize("as_config", [False, True])
def test_stop_strings(medusa: MedusaModel, as_config: bool) -> None:
    tokenizer = letters()
    free = plain(medusa, max_new_tokens=40, do_sample=False)[0, 12:]
    stop = tokenizer.decode(free[9:12])
    options: Any = {"max_new_tokens": 40, "do_sample": False, "stop_strings": [stop]}
    expected = plain(medusa, tokenizer=tokenizer, **options)
    assert expected.shape[1] < 52
    if as_config:
        options = {"generation_config": GenerationConfig(**options)}
    got: Any = medusa.generate(**INPUTS, tokenizer=tokenizer, **options)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="tokenizer="):
        medusa.generate(**INPUTS, **options)
    # A criterion of the caller's own stands in their place.
    later = StopStringCriteria(tokenizer, tokenizer.decode(free[20:23]))
    options |= {"tokenizer": tokenizer, "stopping_criteria": StoppingCriteriaList([later])}
    got = medusa.generate(**INPUTS, **options)
    assert torch.equal(got, plain(medusa, **options))


def test_stop_strings_of_the_models_own_configuration(
    medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, options = letters(), dict[str, Any](max_new_tokens=40, do_sample=False)
    free = plain(medusa, **options)
    own: Any = medusa.target.model.generation_config
    monkeypatch.setattr(own, "stop_strings", [tokenizer.decode(free[0, 21:24])])
    asks: list[dict[str, Any]] = [{}, {"generation_config": GenerationConfig(**options)}]
    asks += [{"stop_strings": [tokenizer.decode(free[0, 15:18])]}, {"stop_strings": None}]
    lengths = set()
    for ask in asks:
        given = {"tokenizer": tokenizer, **(ask if "generation_config" in ask else options | ask)}
        expected = plain(medusa, **given)
        got: Any = medusa.generate(**INPUTS, **given)
        assert torch.equal(got, expected)
        lengths.add(len(expected[0]))
    assert len(lengths) == 3  # as the model says, as the call says, and none


def test_what_generate_would_take_is_refused_by_name(medusa: MedusaModel) -> None:
    own: dict[str, dict[str, Any]] = {
        "token_healing": {"token_healing": True, "tokenizer": letters()},
        "sharded processes": {"synced_gpus": True},
        "assistant_early_exit": {"assistant_early_exit": 1},
        "output_router_logits": {"output_router_logits": True},
    }
    for name, options in own.items():
        with pytest.raises(ValueError, match=name):
            medusa.generate(**INPUTS, max_new_tokens=3, **options)


def test_a_processor_that_runs_the_model_itself(medusa: MedusaModel) -> None:
    options: Any = {"max_new_tokens": 30, "do_sample": False, "guidance_scale": 1.5}
    got: Any = medusa.generate(**INPUTS, **options)
    assert torch.equal(got, plain(medusa, **options))


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"position_ids": torch.arange(5, 17)[None]}, "position_ids"),
        ({"inputs_embeds": torch.zeros(1, 12, 64)}, "inputs_embeds"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    ],
)
def test_inputs_that_would_be_forgotten_are_refused(
    medusa: MedusaModel, extra: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        medusa.generate(**INPUTS, max_new_tokens=4, **extra)


def test_a_tree_that_is_refused_leaves_the_one_before(tiny_llama: TinyLlama) -> None:
    model = tiny_llama(vocab_size=24)
    medusa = MedusaModel(model, MedusaHeads.from_target(model, HeadsConfig(num_heads=3)), tree=8)
    before = medusa.tree, medusa.drafter
    for wrong in ("auto+suffix", "static:0", "chain:0"):
        with pytest.raises(ValueError, match="tree"):
            medusa.use_tree(wrong)
        assert (medusa.tree, medusa.drafter) == before
    got: Any = medusa.generate(**INPUTS, max_new_tokens=20, do_sample=False)
    assert torch.equal(got, plain(medusa, max_new_tokens=20, do_sample=False))


def test_heads_may_be_exchanged_between_two_calls(tiny_llama: TinyLlama) -> None:
    model = tiny_llama(vocab_size=24)
    first, second, other = (
        MedusaHeads.from_target(model, HeadsConfig(num_heads=3, features=layers))
        for layers in (None, None, [0])
    )
    medusa = MedusaModel(model, first, tree=8)
    before, medusa.heads = medusa.drafter, second
    got: Any = medusa.generate(**INPUTS, max_new_tokens=20, do_sample=False)
    assert torch.equal(got, plain(medusa, max_new_tokens=20, do_sample=False))
    assert medusa.drafting is second and medusa.drafter is not before
    medusa.heads = other
    with pytest.raises(ValueError, match="other layers of the target"):
        medusa.generate(**INPUTS, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"expected heads in memory, got str: .*from_pretrained"):
        MedusaModel(model, "runs/heads")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "size"), [("medusa", None), ("medusa", 12), ("hydra", 12)])
def test_heads_follow_a_target_that_is_moved(tiny_llama: TinyLlama, kind: Any, size: Any) -> None:
    """With what they share of it, whole or in part; to a GPU, say."""
    model: Any = tiny_llama(vocab_size=24)
    config = HeadsConfig(kind=kind, num_heads=3, vocab_matrix="shared", draft_vocab_size=size)
    medusa = MedusaModel(model, new_heads(model, config, size and torch.arange(size)), tree="4")
    model.to(torch.float64)
    made: Any = medusa.generate(**INPUTS, max_new_tokens=9)
    assert torch.equal(made, plain(medusa, max_new_tokens=9))
    assert medusa.heads.vocab_matrix(0)[0].dtype == torch.float64
    if kind == "hydra":  # whose embeddings are scaled by numbers
        assert medusa.heads.embed(made).dtype == torch.float64
    else:
        model.to("meta")
        medusa._follow_target()
        assert medusa.drafting.vocab_matrix(0)[0].is_meta
