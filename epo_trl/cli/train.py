"""`epo-trl train`, and the recipes of RL: from the command line to `trainer.train_to_end()`.

`epo_trl/cli/program.py` calls `main` with the command line and its YAML file, which `options.py` reads.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from trl import ModelConfig

from epo_trl.bounds import option
from epo_trl.cli.options import AlgorithmArguments, CommandLine, config_name, find_warm_start, parse_options
from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.models.load import policy_for_training, tiny_size
from epo_trl.rollout.templates import PromptTemplate
from epo_trl.runs.callbacks import EXIT_CODE
from epo_trl.runs.files import FINISHED, read_state
from epo_trl.runs.run_lock import run_lock
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer
from epo_trl.yaml_files import read_yaml

ALGORITHMS: dict[str, tuple[type[EPOConfig], type[EPOTrainer]]] = {
    "grpo": (EPOConfig, EPOTrainer),
    "ppo": (EPOPPOConfig, EPOPPOTrainer),
}


@dataclass
class StartArguments:
    """Initial policy of RL."""

    from_scratch: bool = option(
        False,
        "Allow RL to start from the random weights of `model_name_or_path: tiny`, for debugging. Such a policy never "
        "succeeds, so it learns nothing.",
    )


def main(line: CommandLine) -> None:
    """Parses the options and trains."""
    config, trainer_class = find_algorithm(line.algorithm)
    suite, _, start, args, model_args = parse_options(line, AlgorithmArguments, StartArguments, config, ModelConfig)
    check_start(model_args.model_name_or_path, start, line.config)
    warn_of_other_prompts(model_args.model_name_or_path, args.template_for(suite))
    train(suite, args, model_args, trainer_class)


def find_algorithm(name: str) -> tuple[type[EPOConfig], type[EPOTrainer]]:
    """Returns the config class and the trainer class of an algorithm; `InputError` if there is none."""
    if name not in ALGORITHMS:
        raise InputError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHMS))}, got {name!r}")
    return ALGORITHMS[name]


def check_start(model: str | None, start: StartArguments, config: Path | None) -> None:
    """Raises `InputError` for RL from random weights, or from a warm start that is still to make, and says how."""
    if model is None or (start.from_scratch if tiny_size(model) else Path(model).is_dir()):
        return
    warm_start = find_warm_start(config) if config else None
    folder = read_yaml(warm_start, "--config").get("output_dir") if warm_start else None
    make_it = f"make it with: epo-trl sft --config {config_name(warm_start) if warm_start else 'FILE'}"
    expected = f"model_name_or_path: expected the folder of a warm start, got {model!r}"
    if tiny_size(model):
        raise InputError(
            f"{expected}, random weights that never succeed, so RL teaches them nothing; {make_it}, then add "
            f"--model_name_or_path {folder or 'FOLDER'}; to debug with random weights, add --from_scratch"
        )
    if model == folder:
        raise InputError(f"{expected}, which does not exist; {make_it}")


def warn_of_other_prompts(model: str | None, template: str) -> None:
    """Warns if the run that made the model in a folder had prompts of another template."""
    end = Path(model or "") / FINISHED
    trained = read_state(end, "settings")["settings"].get("template") if end.is_file() else None
    if trained and trained != PromptTemplate.load(template).checksums():
        warnings.warn(
            f"prompt_template: got {template!r}, but {model} was trained on prompts of another template", stacklevel=3
        )


def train(
    suite: TaskSuite, args: EPOConfig, model_args: ModelConfig, trainer_class: type[EPOTrainer] = EPOTrainer
) -> EPOTrainer:
    """Trains with RL, resuming from the last checkpoint in `args.output_dir` if any, and returns the trainer.

    Saves the final model and tokenizer to `output_dir` as a Hub-style checkpoint. A finished run is left unchanged.
    After a SIGTERM the run saves a checkpoint to resume from, and the program exits with code 143.

    Raises:
        RunningError: If another process trains in `output_dir`.
        ValueError: If `output_dir` holds a run with other settings.
    """
    with run_lock(args):
        policy = policy_for_training(model_args, args, suite, args.template_for(suite))
        trainer = trainer_class(suite=suite, args=args, **policy)
        try:
            trainer.train_to_end()
        finally:
            trainer.close_envs()
    if trainer.preempted:
        raise SystemExit(EXIT_CODE)
    return trainer
