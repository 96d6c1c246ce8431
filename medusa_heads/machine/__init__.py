"""This machine: what it has, what it multiplies fastest, and where that is remembered."""

from medusa_heads.machine.choice import Choice, as_dtype, choose
from medusa_heads.machine.devices import find_device
from medusa_heads.machine.facts import describe_machine, machine_facts
from medusa_heads.machine.measurements import Measurements
from medusa_heads.machine.products import Use
from medusa_heads.machine.shape import Shape

__all__ = [
    "Choice",
    "Measurements",
    "Shape",
    "Use",
    "as_dtype",
    "choose",
    "describe_machine",
    "find_device",
    "machine_facts",
]
