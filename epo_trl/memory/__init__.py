"""Estimates the cost of a run from its config: memory per GPU, tokens, seconds, GPU-hours. No model is loaded."""

from epo_trl.memory.hardware import GPUS, Hardware, hardware_of
from epo_trl.memory.inputs import Assumed, Machines
from epo_trl.memory.plan import Plan, make_plan
from epo_trl.memory.rates import Rates, read_rates
from epo_trl.memory.sizes import (
    PRESETS,
    ModelShape,
    Run,
    format_memory,
    format_memory_table,
    host_bytes,
    memory_per_gpu,
    preset_of,
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
    "hardware_of",
    "host_bytes",
    "make_plan",
    "memory_per_gpu",
    "preset_of",
    "read_rates",
    "shape_of",
]
