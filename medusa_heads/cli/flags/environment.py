"""What a process tells torch before it loads it, unless the user has."""

from __future__ import annotations

import os

# A tenth to half of a millisecond: longer than a forward of a small model leaves its threads idle
# between two products, and than it takes to wake one.
_SPINS = "10000"


def told_to_torch() -> dict[str, str]:
    """Environment variables that torch reads when it is loaded, and so do the processes that this
    one starts, but for what the user has set.

    A thread that waits for its part of the next product spins for a moment, and then sleeps. One
    that sleeps at once costs a small model most of its time where waking takes long, as on virtual
    processors; one that spins on takes the time of other programs (docs/machine.md, "Threads that
    wait"). Large tensors lie in huge pages, which the kernel hands out sooner than as much in small
    ones.
    """
    told = {"THP_MEM_ALLOC_ENABLE": "1"}
    if "OMP_WAIT_POLICY" not in os.environ:
        told |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": _SPINS}
    return {name: value for name, value in told.items() if name not in os.environ}
