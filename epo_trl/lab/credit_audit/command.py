"""The body of `epo-trl audit-credit`: compares the credit of each turn with its true advantage."""

from __future__ import annotations

from trl import ModelConfig

from epo_trl.cli.options import AlgorithmArguments, CommandLine, parse_options
from epo_trl.cli.train import StartArguments, find_algorithm
from epo_trl.lab.credit_audit.program import AuditArguments, run_audit


def main(line: CommandLine) -> None:
    """Parses the options and audits."""
    config, _ = find_algorithm(line.algorithm)
    types = (AlgorithmArguments, StartArguments, config, ModelConfig, AuditArguments)
    suite, _, _, args, model_args, audit = parse_options(line, *types)
    run_audit(suite, args, model_args, audit)
