"""Who decodes with what serves one text at a time, such as a cache of fixed size."""

from __future__ import annotations

from threading import RLock, get_ident


class OwnedLock:
    """A lock that a thread may take several times, and that says whether this thread has it."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._owner: int | None = None
        self._times = 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._owner == get_ident()

    def acquire(self, blocking: bool = True) -> bool:
        """Whether this thread has it from now on; without blocking it may not."""
        if not self._lock.acquire(blocking):
            return False
        self._owner = get_ident()
        self._times += 1
        return True

    def release(self) -> None:
        self._times -= 1
        if not self._times:
            self._owner = None
        self._lock.release()


class TextLock:
    """Held while a decoder decodes a text; a copy of the decoder has one of its own. Other threads
    wait for it. The thread that holds it would wait for itself, and is refused.

    Args:
        lock: of the target, where several decoders share it.
        nests: whether the target serves a text of another decoder within this one's.
    """

    def __init__(self, lock: OwnedLock | None = None, nests: bool = False) -> None:
        self._lock, self._nests = lock or OwnedLock(), nests
        self._decoding = False

    def __enter__(self) -> None:
        """Raises ValueError: this thread is in the middle of a text."""
        if self._lock.is_mine and (self._decoding or not self._nests):
            raise ValueError(
                "this decoder is in the middle of a text, from which a logits processor, a "
                "stopping criterion or a streamer has called it: call the target's own generate() "
                "there"
            )
        self._lock.acquire()
        self._decoding = True

    def __exit__(self, *_: object) -> None:
        self._decoding = False
        self._lock.release()

    def __reduce__(self) -> tuple[type[TextLock], tuple[()]]:
        return TextLock, ()
