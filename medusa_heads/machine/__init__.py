"""This machine: what it has, what it multiplies fastest, where that is remembered."""

from medusa_heads.machine.choice import GAIN, Choice, as_dtype, choose, speeds
from medusa_heads.machine.devices import devices_here, find_device, wait_for
from medusa_heads.machine.facts import describe_machine, machine_facts
from medusa_heads.machine.kernels import (
    has_int8_products,
    has_packed_products,
    int8_product,
    pack,
    packed_product,
    turn,
    turned_product,
)
from medusa_heads.machine.measurements import (
    Contention,
    Measurements,
    as_seconds,
    measurement_folder,
)
from medusa_heads.machine.products import Shape, Use, int8_gain, packed_gain, turned_gain

__all__ = [
    "GAIN",
    "Choice",
    "Contention",
    "Measurements",
    "Shape",
    "Use",
    "as_dtype",
    "as_seconds",
    "choose",
    "describe_machine",
    "devices_here",
    "find_device",
    "has_int8_products",
    "has_packed_products",
    "int8_gain",
    "int8_product",
    "machine_facts",
    "measurement_folder",
    "pack",
    "packed_gain",
    "packed_product",
    "speeds",
    "turn",
    "turned_gain",
    "turned_product",
    "wait_for",
]
