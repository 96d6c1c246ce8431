"""Who is served when: turns taken by hand, so that no clock decides."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from medusa_heads.inference.endpoint.scheduler import Closed, Overloaded, Scheduler
from medusa_heads.inference.endpoint.server import Server
from medusa_heads.inference.endpoint.text import Text
from medusa_heads.inference.engine.running import RunningBatch
from tests.inference.endpoint.conftest import Told, scheduler_of


def turns(scheduler: Scheduler) -> int:
    """Until nothing is left to write."""
    count = 0
    while not scheduler.is_idle():
        scheduler.turn()
        count += 1
    return count


def alone(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids_1T = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    text: str = tokenizer.decode(
        ids_1T[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return text


def test_first_come_first_served_and_one_joins_a_turn(endless: Any, tokenizer: Any) -> None:
    scheduler = scheduler_of(endless, tokenizer, 2)
    texts = [Told(prompt, tokenizer, 30) for prompt in ("abc", "de", "f")]
    for told in texts:
        scheduler.submit(told.text)
    scheduler.turn()
    assert [told.text.tokens > 0 for told in texts] == [True, False, False]
    scheduler.turn()
    assert [told.text.tokens > 0 for told in texts] == [True, True, False]
    turns(scheduler)
    for told, prompt in zip(texts, ("abc", "de", "f"), strict=True):
        assert "".join(told.pieces) == alone(endless, tokenizer, prompt, 30)
        assert told.text.ending == "length" and told.text.tokens == 30


def test_a_full_queue_refuses(endless: Any, tokenizer: Any) -> None:
    scheduler = scheduler_of(endless, tokenizer, 2, queue=1)
    texts = [Told("abc", tokenizer, tokens) for tokens in (3, 20, 20, 5)]
    for told in texts[:3]:  # two for the rows, which are free, and one that waits for them
        scheduler.submit(told.text)
    for _ in range(2):
        with pytest.raises(Overloaded, match="try again in 1 s") as refused:
            scheduler.submit(texts[3].text)
        assert refused.value.seconds >= 1
        scheduler.turn()  # one has left the queue, and has a row
    while texts[0].text.ending is None:
        scheduler.turn()
    scheduler.submit(texts[3].text)
    turns(scheduler)
    assert [told.text.ending for told in texts] == ["length"] * 4
    assert 'requests_total{outcome="refused"} 2\n' in scheduler.metrics.text()


def test_cancelled_texts_free_their_rows(endless: Any, tokenizer: Any) -> None:
    """One that is written, one that waits; and one that has ended stays as it is."""
    scheduler = scheduler_of(endless, tokenizer, 1)
    first, second, third = (Told("abc", tokenizer, tokens) for tokens in (300, 9, 9))
    for told in (first, second, third):
        scheduler.submit(told.text)
    scheduler.turn()
    scheduler.cancel(first.text)
    scheduler.cancel(second.text)
    scheduler.turn()
    assert first.text.ending == second.text.ending == "cancelled" and second.text.tokens == 0
    assert third.text.tokens > 0
    turns(scheduler)
    scheduler.cancel(third.text)
    scheduler.turn()
    assert third.text.ending == "length"
    text = scheduler.metrics.text()
    assert "medusa_heads_cache_bytes 0\n" in text and "requests_running 0\n" in text


def test_who_is_told_of_the_end_can_ask_again(endless: Any, tokenizer: Any) -> None:
    """However it ended, in a row and in the queue, there is room for as many as before."""
    scheduler = scheduler_of(endless, tokenizer, 1, queue=1)
    for _ in range(3):
        done, failed, left = (Told("abc", tokenizer, 3) for _ in range(3))
        failed.text.options["num_beams"] = 3
        scheduler.submit(done.text)

        def ask_again(_: str, ending: Any, text: Any = left.text) -> None:
            if ending:
                scheduler.submit(text)

        done.text.tell = ask_again
        scheduler.submit(failed.text)
        while done.text.ending is None:
            scheduler.turn()
        scheduler.cancel(left.text)
        turns(scheduler)
        assert [each.text.ending for each in (done, failed, left)] == [
            "length", "failed", "cancelled"
        ]  # fmt: skip


def test_the_cache_has_room_for_so_much(endless: Any, tokenizer: Any) -> None:
    batch = endless.running_batch(4)
    room = 2 * batch.row_bytes(40)
    scheduler = scheduler_of(endless, tokenizer, 4, cache_bytes=room)
    texts = [Told("abc", tokenizer, 30) for _ in range(4)]
    for told in texts:
        scheduler.submit(told.text)
    while not scheduler.is_idle():
        scheduler.turn()
        assert sum(told.text.ending is None and told.text.tokens > 0 for told in texts) <= 2
    assert [told.text.ending for told in texts] == ["length"] * 4
    with pytest.raises(ValueError, match="ask for fewer"):
        scheduler.submit(Told("abc", tokenizer, 200).text)


def test_what_a_long_text_leaves_behind_is_no_room_for_others(endless: Any, tokenizer: Any) -> None:
    """It was less than half of what all had, and every row that came would have had it too."""
    batch = endless.running_batch(16)
    scheduler = scheduler_of(endless, tokenizer, 16, cache_bytes=3 * batch.row_bytes(400))
    long = Told("a" * 200, tokenizer, 200)
    shorter = [Told("a" * 110, tokenizer, 130) for _ in range(4)]
    for told in (long, *shorter):
        scheduler.submit(told.text)
    for _ in range(4):
        scheduler.turn()
    scheduler.cancel(long.text)
    most = 0
    while not scheduler.is_idle():
        scheduler.turn()
        text = scheduler.metrics.text()
        most = max(most, int(text.partition("cache_bytes ")[2].split()[-1]))
    assert 0 < most <= 3 * batch.row_bytes(400)
    for told in shorter:
        assert "".join(told.pieces) == alone(endless, tokenizer, "a" * 110, 130)


def test_a_text_that_fails_leaves_the_others_alone(
    endless: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = scheduler_of(endless, tokenizer, 2)
    good, bad = Told("abc", tokenizer, 12), Told("de", tokenizer, 12)
    bad.text.options["num_beams"] = 3
    scheduler.submit(bad.text)
    scheduler.submit(good.text)
    turns(scheduler)
    assert bad.text.ending == "failed" and "num_beams" in str(bad.text.fault)
    assert "".join(good.pieces) == alone(endless, tokenizer, "abc", 12)

    def fall(*_: Any) -> None:
        raise RuntimeError("out of something")

    broken = Told("abc", tokenizer, 12)
    scheduler.submit(broken.text)
    with monkeypatch.context() as patched:
        patched.setattr("medusa_heads.inference.engine.running.take_step", fall)
        scheduler.turn()
    assert broken.text.ending == "failed" and scheduler.is_idle()
    after = Told("abc", tokenizer, 12)
    scheduler.submit(after.text)
    turns(scheduler)
    assert "".join(after.pieces) == alone(endless, tokenizer, "abc", 12)


def test_what_failed_texts_held_is_free_at_once(
    endless: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, the next text would be so too where the cache waits for Python's collector."""
    batch = endless.running_batch(2)
    scheduler = Scheduler(batch, endless.target.model, tokenizer.decode)
    broken = Told("abc", tokenizer, 12)
    scheduler.submit(broken.text)
    scheduler.turn()
    (running,) = batch._batches.values()
    cache = weakref.ref(running.state.cache)
    del running

    def fall(*_: Any, **__: Any) -> None:
        try:
            raise MemoryError
        except MemoryError as short:
            raise torch.OutOfMemoryError("CUDA out of memory.") from short

    gc.collect()
    monkeypatch.setattr(endless.target.model, "forward", fall)
    gc.disable()
    try:
        scheduler.turn()
        assert cache() is None
    finally:
        gc.enable()
    assert broken.text.ending == "failed" and "out of memory" in str(broken.text.fault)


@pytest.mark.parametrize("unknown", ["prompt", "text"])
def test_a_tokenizer_that_fails_fails_one_text(unknown: str, endless: Any, tokenizer: Any) -> None:
    """As those written in Python do on ids that a padded vocabulary has and they have not."""
    good = Told("abc", tokenizer, 12)
    bad = Told("~" if unknown == "prompt" else "abc", tokenizer, 1)
    known = tokenizer("abc")["input_ids"]

    def decode(ids: list[int]) -> str:
        if bad.text.ending is None and ids != known:
            raise TypeError("sequence item 0: expected str instance, NoneType found")
        text: str = tokenizer.decode(ids)
        return text

    scheduler = Scheduler(endless.running_batch(1), endless.target.model, decode)
    for told in (bad, good):
        scheduler.submit(told.text)
    turns(scheduler)
    assert bad.text.ending == "failed" and isinstance(bad.text.fault, TypeError)
    assert "".join(good.pieces) == alone(endless, tokenizer, "abc", 12)
    text = scheduler.metrics.text()
    assert 'outcome="failed"} 1\n' in text and 'outcome="finished"} 1\n' in text


def test_the_thread_ends_and_what_was_being_written_fails(endless: Any, tokenizer: Any) -> None:
    scheduler = scheduler_of(endless, tokenizer, 1)
    texts = [Told("abc", tokenizer, 400) for _ in range(2)]
    with scheduler:
        for told in texts:
            scheduler.submit(told.text)
        scheduler.cancel(texts[0].text)
    assert scheduler._thread is not None and not scheduler._thread.is_alive()
    assert texts[0].text.ending in ("cancelled", "failed")
    assert texts[1].text.ending == "failed" and isinstance(texts[1].text.fault, Closed)
    with pytest.raises(Closed):
        scheduler.submit(Told("abc", tokenizer, 4).text)
    assert not scheduler.is_open


class _Panic(BaseException):
    """As libraries in Rust raise it: no Exception."""


@pytest.mark.parametrize("when", ["begin", "end_step"])
def test_whatever_ends_the_thread_nobody_waits_for_it(
    when: str, endless: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that nothing is written any more can be seen."""

    def fall(*_: Any, **__: Any) -> None:
        raise _Panic

    monkeypatch.setattr(Text, when, fall)
    scheduler = scheduler_of(endless, tokenizer, 1)
    texts = [Told("abc", tokenizer, 3) for _ in range(3)]
    for told in texts:
        scheduler.submit(told.text)
    scheduler._run()
    assert not scheduler.is_open
    assert [told.text.ending for told in texts] == ["failed"] * 3


def test_models_that_cannot_be_served_are_refused(endless: Any) -> None:
    model = endless.target.model
    streaming = type(endless)(model, "recycling", rng="transformers")
    with pytest.raises(ValueError, match="want rng='keyed'"):
        streaming.running_batch(2)
    compiled = type(endless)(model, "suffix", compile=True, compile_backend="eager")
    with pytest.raises(ValueError, match="leave compile out"):
        compiled.running_batch(2)


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [("num_beams", 2, "num_beams"), ("cache_implementation", "static", "cache_implementation")],
)
def test_settings_that_would_refuse_every_request_are_refused_at_once(
    setting: str, value: Any, named: str, endless: Any, tokenizer: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(endless.target.model.generation_config, setting, value)
    sentence = f"no request could be answered by the target's own generation settings: .*{named}"
    with pytest.raises(ValueError, match=sentence):
        Server(endless, tokenizer, port=0)


def test_rows_join_while_generate_runs_beside_them(endless: Any, tokenizer: Any) -> None:
    """They take turns at the target."""
    batch: RunningBatch = endless.running_batch(2)
    row = batch.add(
        torch.tensor([tokenizer("abc")["input_ids"]]), max_new_tokens=20, do_sample=False
    )
    expected = alone(endless, tokenizer, "abc", 20)
    while not row.done:
        batch.step()
        assert alone(endless, tokenizer, "xyz", 3)
    assert tokenizer.decode(row.tokens) == expected
