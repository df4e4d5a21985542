"""Plays the whole fixed test lists with a checkpoint and reports under a named protocol.

    python recipes/evaluate.py --config recipes/alfworld/eval_tiny_cpu.yaml --model_name_or_path runs/.../grpo_epo

On several GPUs: `accelerate launch recipes/evaluate.py ...`; the lists are spread over the processes.
"""

import contextlib
import sys
from dataclasses import dataclass, field

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from trl import ModelConfig

from epo_trl.evaluation import EvalReport, format_table, get_protocol
from epo_trl.evaluation.play import check_first_task, play_split, protocol_context
from epo_trl.evaluation.samples import print_episodes
from epo_trl.models import load_policy
from epo_trl.models.generate import SamplingPolicy
from epo_trl.recipe import parse_recipe, run_recipe
from epo_trl.trainers.state_file import write_state


@dataclass
class EvaluationArguments:
    """How to evaluate."""

    protocol: str = field(default="alfworld50", metadata={"help": "Name of the protocol."})
    splits: list[str] = field(default_factory=lambda: ["iid", "ood"], metadata={"help": "Lists to play."})
    prompt_template: str = field(default="alfworld", metadata={"help": "As in training."})
    max_prompt_length: int = field(default=2048, metadata={"help": "Longest prompt of a turn, in tokens."})
    max_completion_length: int = field(default=512, metadata={"help": "Longest response of a turn, in tokens."})
    require_think: bool = field(default=True, metadata={"help": "As in training."})
    parallel: int = field(default=64, metadata={"help": "Episodes played side by side."})
    max_episodes: int | None = field(default=None, metadata={"help": "Play only the first N tasks of each list."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling and of the environments."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the reports."})
    show_episodes: int = field(default=0, metadata={"help": "Episodes of each list to print."})


def main() -> None:
    """Parses the configuration, plays and reports."""
    suite, args, model_args = parse_recipe(EvaluationArguments, ModelConfig)
    lists = {split: suite.task_ids(split)[: args.max_episodes] for split in args.splits}
    if not lists or not all(lists.values()):
        lengths = {split: len(suite.task_ids(split)) for split in suite.splits}
        raise ValueError(
            f"splits: got {args.splits} (max_episodes={args.max_episodes}), takes names of lists that are not empty; "
            f"{suite.name} has {lengths}"
        )
    state, protocol = PartialState(), get_protocol(args.protocol)
    model, tokenizer = load_policy(model_args, suite, args.prompt_template, device=state.device, seed=args.seed)
    policy = SamplingPolicy(
        model,
        tokenizer,
        max_new_tokens=args.max_completion_length,
        temperature=protocol.temperature,
        seed=args.seed + state.process_index,
    )
    context = protocol_context(
        protocol,
        tokenizer,
        args.prompt_template,
        max_prompt_tokens=args.max_prompt_length,
        max_response_tokens=args.max_completion_length,
        max_context_tokens=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )
    with contextlib.closing(suite.make_env()) as env:
        check_first_task(env, next(iter(lists.values()))[0], args.seed, context, protocol)
    reports = []
    for split, task_ids in lists.items():
        hidden = not state.is_main_process
        with tqdm(total=len(task_ids), desc=split, unit="episode", disable=hidden, file=sys.stderr) as bar:
            episodes, seconds = play_split(
                suite,
                task_ids[state.process_index :: state.num_processes],
                policy,
                context,
                protocol,
                seed=args.seed,
                parallel=args.parallel,
                require_think=args.require_think,
                on_finished=bar.update,
            )
        if state.num_processes > 1:
            episodes = gather_object([episode.without_tokens() for episode in episodes])
        reports.append(
            EvalReport.from_episodes(episodes, protocol=protocol, suite=suite.name, split=split, seconds=seconds)
        )
        if state.is_main_process and args.show_episodes:
            print_episodes(episodes[: args.show_episodes])
    if state.is_main_process:
        print(format_table(reports))
        if args.output:
            results = {"model": model_args.model_name_or_path, "reports": [report.to_dict() for report in reports]}
            write_state(args.output, results)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_recipe(main, configs=["*/eval_*"])
