"""AgentEvol (arXiv 2406.04151): a policy learns from its own successes by imitation, without policy gradients.

In each round the policy plays training tasks, keeps the episodes that it won, and is trained anew by imitation on them
and on the expert's episodes. The config is that of the warm start; every round starts from `--model_name_or_path`:

    python recipes/sft.py --config recipes/alfworld/sft_tiny_cpu.yaml
    python recipes/agent_evol.py --config recipes/alfworld/sft_tiny_cpu.yaml \\
        --model_name_or_path runs/alfworld-tiny/sft --output_dir runs/alfworld-tiny/agent_evol \\
        --rounds 4 --samples 1000 --max_steps 1000 --max_completion_length 20

The authors' rounds start from the chat model before any imitation. Here they start from the given model, which has to
be a warm start: an untrained model wins no episode, and this recipe plays before it trains.

The policies are in `output_dir/round-1`, `round-2`, ... With a `protocol`, the test lists are evaluated before the
first round and after each; without one, evaluate the last policy with recipes/evaluate.py. Repeating the command
resumes an interrupted run.
"""

import epo_trl.threads  # noqa: F401 - before torch

import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from accelerate import PartialState
from datasets import Dataset, concatenate_datasets
from tqdm.auto import tqdm
from trl import ModelConfig

from epo_trl.bounds import Count, Positive, copy_options, option
from epo_trl.cli.evaluation import EvaluationArguments, evaluate, load_player
from epo_trl.cli.imitation import (
    DemonstrationArguments,
    ImitationConfig,
    ImitationTrainer,
    check_length,
    demonstrations,
    describe_rows,
    training_examples,
)
from epo_trl.cli.options import CommandLine, ConfigIsValid, parse_options
from epo_trl.cli.program import run_recipe
from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import play_chunks, protocol_settings, split_chunks
from epo_trl.evaluation.report import report_file
from epo_trl.models import policy_for_training
from epo_trl.models.load import config_of, end_ids_of, sequence_limit, tiny_size, tokenizer_of
from epo_trl.rollout import PromptTemplate
from epo_trl.rollout.demonstrations import Demonstration, few_shot_of
from epo_trl.rollout.spec import ResponseArguments
from epo_trl.rollout.templates import FewShot
from epo_trl.runs.callbacks import EXIT_CODE
from epo_trl.runs.files import read_state, what_model, write_state
from epo_trl.runs.guards import TooManyAborted, first_errors
from epo_trl.runs.run_lock import run_lock
from epo_trl.runs.run_settings import content_digest
from epo_trl.types import Episode

MAX_ABORTED_SHARE = 0.5  # share of a process's episodes, as in RL


@dataclass
class EvolutionArguments(DemonstrationArguments, ResponseArguments):
    """Settings of the policy's exploration, and of the demonstrations."""

    rounds: Count = option(4, "Number of rounds of play and training; 4 in the paper.")
    samples: Count = option(1000, "Number of episodes per round, over all processes.")
    sampling_temperature: Positive = option(1.0, "Sampling temperature of the episodes.")
    parallel: Count = option(64, "Number of episodes that a process plays in parallel.")
    protocol: str = option(
        "", "Protocol of the test lists, before the first round and after each; no evaluation by default."
    )
    action_format: str = field(default="tags", init=False)  # that of the demonstrations


class EvolutionTrainer(ImitationTrainer):
    """The trainer of the warm start, with a model card that names the source of the imitated episodes."""

    own_successes = 0  # rows, like `demonstrated`

    def card_rows(self) -> dict[str, str]:
        """Returns the rows of the model card."""
        method = (
            "[AgentEvol](https://arxiv.org/abs/2406.04151), imitation of a scripted expert and of its own successes"
        )
        own = describe_rows(self.own_successes, self.shown)
        return {**super().card_rows(), "method": method, "own successes": own}


def rollout_arguments(
    suite: TaskSuite, options: EvolutionArguments, args: ImitationConfig, seed: int
) -> EvaluationArguments:
    """Returns the settings of the policy's episodes, on training tasks and on the test lists."""
    splits = [split for split in suite.splits if split != "train"]
    trust = args.trust_remote_code
    return copy_options(EvaluationArguments, options, max_turns=None, splits=splits, seed=seed, trust_remote_code=trust)


def play_round(
    suite: TaskSuite, player: ModelConfig, options: EvolutionArguments, args: EvaluationArguments, shots: FewShot,
    max_length: int | None,
) -> Iterator[Episode]:  # fmt: skip
    """Yields this process's episodes of a round. A concatenated episode ends before it exceeds `max_length`."""
    state, seed = PartialState(), args.seed
    rules = Protocol(
        name="agent-evol",
        max_turns=options.max_turns,
        history_length=options.history_length,
        temperature=options.sampling_temperature,
        context=options.context,
    )
    policy, context = load_player(suite, args, player, rules, shots, max_length)
    settings = protocol_settings(rules, require_think=options.require_think)
    ids = list(suite.task_ids("train"))
    random.Random(seed).shuffle(ids)
    tasks = [ids[i % len(ids)] for i in range(options.samples)][state.process_index :: state.num_processes]
    chunks = split_chunks(tasks, options.parallel)
    first_seed = seed * 1_000_003 + state.process_index * 1009
    for episodes, _ in play_chunks(
        suite, chunks, lambda i: policy.seeded(first_seed + i), context, settings, seed=seed
    ):
        yield from episodes


def collect_successes(
    folder: str, suite: TaskSuite, player: ModelConfig, options: EvolutionArguments, args: EvaluationArguments,
    max_length: int | None,
) -> Dataset:  # fmt: skip
    """Returns the policy's won episodes as training examples, and caches them in the folder. Collective.

    Raises:
        TooManyAborted: If the environment failed in most episodes. Nothing is saved then.
        ValueError: If the folder holds episodes that were played with other settings.
    """
    state, shots = PartialState(), few_shot_of(options, suite)
    settings = {
        "policy": what_model(str(player.model_name_or_path)),
        "revision": player.model_revision,
        "seed": args.seed,
        "processes": state.num_processes,
        "max_length": max_length,
        "environment": {name: str(value) for name, value in suite.settings.items()},
        "template": PromptTemplate.load(options.template_for(suite)).checksums(),
        "examples": shots.label,
        "tasks": content_digest([list(suite.task_ids("train")), suite.content("train")]),
        **vars(options),
    }
    del settings["rounds"], settings["protocol"]
    own = os.path.join(folder, f"successes_{state.process_index}.json")
    if os.path.exists(own):
        found = read_state(own, "settings")["settings"]
        other = sorted(name for name, value in settings.items() if found.get(name) != value)
        if other:
            raise InputError(f"{', '.join(other)}: {own} was played with other settings; use another output_dir")
    else:
        os.makedirs(folder, exist_ok=True)
        episodes = play_round(suite, player, options, args, shots, max_length)
        total = len(range(state.process_index, options.samples, state.num_processes))
        played = list(tqdm(episodes, total=total, desc=os.path.basename(folder), unit="episode",
                           disable=not state.is_main_process))  # fmt: skip
        aborted = [episode for episode in played if not episode.is_usable]
        if len(aborted) > MAX_ABORTED_SHARE * total:
            errors = "; ".join(first_errors(aborted, state.process_index))
            raise TooManyAborted(f"{len(aborted)} of {total} episodes were aborted, and none is kept: {errors}")
        won = [[[list(t.prompt_ids), list(t.response_ids)] for t in each.turns] for each in played if each.won]
        write_state(own, {"settings": settings, "played": total, "won": won})
    state.wait_for_everyone()
    files = [os.path.join(folder, f"successes_{rank}.json") for rank in range(state.num_processes)]
    read = [read_state(file, "played", "won") for file in files]
    won, count = [turns for part in read for turns in part["won"]], sum(part["played"] for part in read)
    if state.is_main_process:
        print(f"{os.path.basename(folder)}: {len(won)} of {count} episodes won", flush=True)
    if not won:
        warnings.warn(
            f"{player.model_name_or_path} has won no episode, so this round trains on the expert's episodes only",
            stacklevel=2,
        )
    turns_of_episodes = [[Demonstration(*turn) for turn in turns] for turns in won]
    return training_examples(turns_of_episodes, options.context)


def evaluate_round(
    args: ImitationConfig, number: int, suite: TaskSuite, player: ModelConfig, options: EvolutionArguments
) -> None:
    """Evaluates the test lists after round `number`, unless done before. Writes the reports where RL runs do.

    Raises:
        ValueError: If a report exists for another policy or protocol.
    """
    if not options.protocol:
        return
    file = report_file(args.output_dir, number)
    now = {"protocol": options.protocol, "policy": what_model(str(player.model_name_or_path))}
    if file.exists():
        found = read_state(file, "step", *now)
        for name, value in now.items():
            if found[name] != value:
                raise InputError(f"{name}: expected {found[name]} as in {file}, got {value}; use another output_dir")
        return
    reports = evaluate(suite, rollout_arguments(suite, options, args, args.seed), player)
    if PartialState().is_main_process:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_state(file, {"step": number, **now, "reports": [report.to_dict() for report in reports]})


def make_player(model_args: ModelConfig) -> ModelConfig:
    """Returns the settings of the policy that plays: weights in their own precision, unless they are quantized."""
    quantized = model_args.load_in_4bit or model_args.load_in_8bit  # `dtype` is that of computation then
    return model_args if quantized else replace(model_args, dtype="auto")


def main(line: CommandLine) -> None:
    """Alternates play and training."""
    types = EvolutionArguments, ImitationConfig, ModelConfig
    suite, options, args, model_args = parse_options(replace(line, check_only=False), *types)
    trained = model_args.model_name_or_path is not None and not tiny_size(model_args.model_name_or_path)
    if not trained and not line.check_only:  # the config of a warm start names an untrained model
        raise InputError("model_name_or_path: expected a warm start, see recipes/sft.py, got an untrained model")
    longest = options.max_prompt_length + options.max_completion_length
    if args.max_length is not None and longest > args.max_length:
        raise InputError(
            f"max_length: expected {longest} or more, the sum of max_prompt_length and max_completion_length, got "
            f"{args.max_length}: responses would be truncated"
        )
    if line.check_only:
        raise ConfigIsValid
    player = make_player(model_args)
    with run_lock(args):
        tokenizer = tokenizer_of(model_args, args.trust_remote_code)
        ends = end_ids_of(model_args, tokenizer, args.trust_remote_code)
        expert = demonstrations(suite, tokenizer, options, args.seed, ends)
        check_length(expert, args.max_length)
        limit = sequence_limit(config_of(model_args, args.trust_remote_code))
        check_length(expert, limit, "max_position_embeddings")
        evaluate_round(args, 0, suite, player, options)
        for number in range(1, options.rounds + 1):
            folder = os.path.join(args.output_dir, f"round-{number}")
            playing = rollout_arguments(suite, options, args, args.seed + number)
            own = collect_successes(folder, suite, player, options, playing, args.max_length)
            round_args = replace(args, output_dir=folder)
            policy = policy_for_training(model_args, round_args, suite, options.template_for(suite))
            data = concatenate_datasets([expert, own]) if len(own) else expert
            trainer = EvolutionTrainer(
                suite, options, demonstrated=len(expert), args=round_args, train_dataset=data, **policy
            )
            trainer.own_successes = len(own)
            trainer.train_to_end()
            if trainer.preempted:
                raise SystemExit(EXIT_CODE)
            player = replace(player, model_name_or_path=folder)  # the revision is the start's; a folder has none
            evaluate_round(args, number, suite, player, options)


if __name__ == "__main__":
    sys.exit(run_recipe("sft", "agent_evol.py", sys.argv[1:], main))
