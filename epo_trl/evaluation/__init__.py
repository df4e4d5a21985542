"""Evaluation protocols, confidence intervals and reports. Importing it loads neither torch nor a game."""

from epo_trl.evaluation.protocol import Protocol, get_protocol, protocol_names, register_protocol
from epo_trl.evaluation.report import EvalReport, TypeCount, format_table, wilson_interval

__all__ = [
    "EvalReport",
    "Protocol",
    "TypeCount",
    "format_table",
    "get_protocol",
    "protocol_names",
    "register_protocol",
    "wilson_interval",
]
