"""Requests side by side, in threads that nobody has to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from medusa_heads.inference.regeneration.answers import Answer, Answers, Take
from medusa_heads.inference.regeneration.prompts import Prompt


def side_by_side(
    ask: Callable[[Prompt], Answer], take: Take, concurrency: int
) -> Iterator[Answers]:
    """Answers as they come, so many prompts being asked at the same time and as many at hand. What
    is on its way when the iterator is closed is left alone. Raises what `ask` raises, behind the
    answers that came before it."""
    asked: SimpleQueue[Prompt | None] = SimpleQueue()
    finished: SimpleQueue[tuple[Prompt, Answer | BaseException]] = SimpleQueue()

    def work() -> None:
        while (prompt := asked.get()) is not None:
            try:
                finished.put((prompt, ask(prompt)))
            except BaseException as error:  # else who waits for the answer would wait for ever
                finished.put((prompt, error))

    # Not those of an executor, which the end of the program waits for.
    for _ in range(concurrency):
        Thread(target=work, daemon=True).start()
    under_way = 0
    try:
        while True:
            for prompt in take(2 * concurrency - under_way):
                asked.put(prompt)
                under_way += 1
            if not under_way:
                return
            made = [finished.get()]
            while not finished.empty():
                made.append(finished.get())
            under_way -= len(made)
            yield [(prompt, got) for prompt, got in made if isinstance(got, Answer)]
            for _, got in made:
                if isinstance(got, BaseException):
                    raise got
    finally:
        with suppress(Empty):
            while True:
                asked.get_nowait()
        for _ in range(concurrency):
            asked.put(None)
