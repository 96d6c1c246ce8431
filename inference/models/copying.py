"""What becomes of a decoder that is copied, or sent to another process."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, TypeVar

from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

Own = TypeVar("Own", bound="Copied")


class Copied:
    """A decoder. A deep copy has a copy of the target, and the graphs and locks of one whose steps
    are compiled or recorded have none; what drafters know of living texts cannot be pickled."""

    target: TargetModel

    def __copy__(self: Own) -> Own:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self: Own, memo: dict[int, Any]) -> Own:
        """Raises ValueError: the target's steps are compiled or recorded."""
        if isinstance(self.target, CompiledTarget):
            raise ValueError(
                "a decoder whose steps are compiled or recorded cannot be copied: make another one "
                "of a copy of target.model, or make this one with compile=False"
            )
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise ValueError(
            f"a {name} cannot be pickled: make it with {name}.from_pretrained where it is needed, "
            "of heads in a folder that save_pretrained has written"
        )
