"""Who decodes with what serves one text at a time, such as a cache of fixed size."""

from __future__ import annotations

from threading import Lock, get_ident


class TextLock:
    """Held while a text is decoded; a copy of what holds it has one of its own. Other threads wait
    for it. The thread that holds it would wait for itself, and is refused."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: int | None = None  # the thread that holds it

    def acquire(self, blocking: bool = True) -> bool:
        """Whether it is held from now on, by this thread; without blocking it may not be."""
        held = self._lock.acquire(blocking)
        if held:
            self._owner = get_ident()
        return held

    def release(self) -> None:
        self._owner = None
        self._lock.release()

    def __enter__(self) -> None:
        """Raises ValueError: this thread holds it."""
        if self._owner == get_ident():
            raise ValueError(
                "this decoder is in the middle of a text, from which a logits processor, a "
                "stopping criterion or a streamer has called it: call the target's own generate() "
                "there"
            )
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __reduce__(self) -> tuple[type[TextLock], tuple[()]]:
        return TextLock, ()
