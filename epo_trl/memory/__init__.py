"""Estimates the cost of a run from its config: memory per GPU, tokens, seconds, GPU-hours. No model is loaded."""

from epo_trl.memory.hardware import GPUS, Hardware, find_hardware
from epo_trl.memory.inputs import Assumed, Machines
from epo_trl.memory.plan import Plan, make_plan
from epo_trl.memory.rates import Rates, read_rates
from epo_trl.memory.sizes import (
    PRESETS,
    ModelShape,
    Run,
    find_preset,
    format_memory,
    format_memory_table,
    host_bytes,
    memory_per_gpu,
    shape_of,
)

__all__ = [
    "GPUS",
    "PRESETS",
    "Assumed",
    "Hardware",
    "Machines",
    "ModelShape",
    "Plan",
    "Rates",
    "Run",
    "format_memory",
    "format_memory_table",
    "find_hardware",
    "host_bytes",
    "make_plan",
    "memory_per_gpu",
    "find_preset",
    "read_rates",
    "shape_of",
]
