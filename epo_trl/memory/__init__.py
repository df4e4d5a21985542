"""Estimates the memory of a run per GPU, from its sizes or from its config. No model is loaded."""

from epo_trl.memory.config import MeanTurn, read_run
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
    "PRESETS",
    "MeanTurn",
    "ModelShape",
    "Run",
    "find_preset",
    "format_memory",
    "format_memory_table",
    "host_bytes",
    "memory_per_gpu",
    "read_run",
    "shape_of",
]
