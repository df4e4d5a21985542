"""The body of `recipes/evaluate.py` and `epo-trl evaluate`: evaluates whole test lists under a named protocol."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from trl import ModelConfig

from epo_trl.bounds import Count, CountOrZero, OneOf, option
from epo_trl.cli.base import progress_bar, say
from epo_trl.cli.options import CommandLine, parse_options
from epo_trl.envs import Expert, TaskSuite
from epo_trl.evaluation import EvalReport, Protocol, format_table, get_protocol
from epo_trl.evaluation.paired import compare, read_reports
from epo_trl.evaluation.partial_results import PartialResults
from epo_trl.evaluation.play import (
    RandomPlayer,
    check_first_task,
    play_chunks,
    play_scripted,
    protocol_context,
    protocol_settings,
    sampled_tasks,
    split_chunks,
)
from epo_trl.evaluation.samples import print_episodes
from epo_trl.models import load_policy
from epo_trl.models.generate import SamplingPolicy
from epo_trl.models.load import check_model_name, config_of, sequence_limit
from epo_trl.models.vllm import load_vllm_policy
from epo_trl.rollout import ContextBuilder, Engine, PromptTemplate
from epo_trl.rollout.demonstrations import few_shot_of
from epo_trl.rollout.spec import FewShotArguments, ProtocolArguments, ResponseArguments
from epo_trl.rollout.templates import FewShot
from epo_trl.runs.files import what_model
from epo_trl.runs.guards import SHOWN, TooManyAborted
from epo_trl.runs.run_lock import place_lock
from epo_trl.runs.run_settings import content_digest
from epo_trl.types import Episode, StopReason
from epo_trl.watch.sample import Sample, choose_samples, write_samples
from epo_trl.watch.source import evaluation_file

MODEL, EXPERT = "model", "expert"
PLAYERS = (MODEL, EXPERT, "random")
BACKENDS = ("transformers", "vllm")
MAX_ABORTED_SHARE = 0.5  # of a list's episodes; above it there is no report


@dataclass
class EvaluationArguments(ResponseArguments, ProtocolArguments):
    """Settings of an evaluation."""

    player: Annotated[str, OneOf(PLAYERS)] = option(
        MODEL, "'model', 'expert' (the environment's own), or 'random': any admissible action, each as likely."
    )
    splits: list[str] = option(lambda: ["iid", "ood"], "Task lists to evaluate.")
    parallel: Count = option(64, "Number of episodes played in parallel.")
    eval_episodes: Count | None = option(None, "Evaluate on a fixed random sample of N tasks of each list.")
    seed: int = option(0, "Seed of the sampling and of the environments.")
    backend: Annotated[str, OneOf(BACKENDS)] = option("transformers", "Generation backend: 'transformers' or 'vllm'.")
    vllm_gpu_memory_utilization: float = option(0.9, "Fraction of each GPU's memory that vLLM reserves.")
    use_cpu: bool = option(False, "Whether to use the CPU on a machine with a GPU.")
    trust_remote_code: bool = option(False, "Whether code of the model from the Hub or its folder may run.")
    output: str | None = option(None, "JSON file for the reports; partial results are stored next to it until the end.")
    compare_to: str | None = option(
        None, "Report of another policy on the same games; prints who won which, with McNemar's test."
    )
    show_episodes: CountOrZero = option(0, "Number of episodes of each list to print.")
    keep_episodes: CountOrZero = option(
        20, "Number of episodes of each list to store next to the output for `epo-trl watch`."
    )


def load_protocol(args: EvaluationArguments, suite: TaskSuite) -> Protocol:
    """Returns the protocol with the overrides of the options, which its name then records."""
    rules = get_protocol(args.protocol or suite.protocol)
    return rules.varied(max_turns=args.max_turns, temperature=args.temperature, context=args.context)


# Options that do not affect the results, are part of the protocol, or name a folder whose contents are compared.
NOT_SETTINGS = {one.name for kind in (ProtocolArguments, FewShotArguments) for one in fields(kind)}
NOT_SETTINGS |= {"compare_to", "output", "show_episodes", "keep_episodes", "prompt_template", "player"}
NOT_SETTINGS |= {"trust_remote_code", "vllm_gpu_memory_utilization"}


def result_settings(
    suite: TaskSuite, args: EvaluationArguments, model_args: ModelConfig, protocol: Protocol, lists: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns all settings that affect the result. Partial results are reused only if these are equal."""
    loading = {key: str(value) for key, value in asdict(model_args).items() if key != "model_name_or_path"}
    return {
        **{key: value for key, value in asdict(args).items() if key not in NOT_SETTINGS},
        "protocol": protocol.rules(),
        "tasks": hashlib.sha256(json.dumps([suite.name, lists]).encode()).hexdigest(),
        **game_settings(suite, lists),
        "template": content_digest(asdict(PromptTemplate.load(args.template_for(suite))) | {"name": ""}),
        "model": loading,
        "weights": what_model(model_args.model_name_or_path or "") if args.player == MODEL else args.player,
        "processes": PartialState().num_processes,
    }


def game_settings(suite: TaskSuite, splits: Iterable[str]) -> dict[str, Any]:
    """Returns the settings that decide, besides the suite's name, which games the ids of some lists name."""
    return {
        "contents": {split: content_digest(suite.content(split)) for split in splits},
        "environment": {key: str(value) for key, value in suite.settings.items()},
    }


def load(
    suite: TaskSuite, args: EvaluationArguments, model_args: ModelConfig, protocol: Protocol
) -> tuple[Any, Any, int | None]:
    """Loads the policy; returns it with its tokenizer and its maximum sequence length."""
    state, trust = PartialState(), {"trust_remote_code": args.trust_remote_code}
    sampling: dict[str, Any] = {"max_new_tokens": args.max_completion_length, "temperature": protocol.temperature}
    if args.backend == "vllm":
        engine, tokenizer = load_vllm_policy(
            model_args,
            **sampling,
            max_model_len=args.max_prompt_length + args.max_completion_length if protocol.is_windowed else None,
            gpu_share=args.vllm_gpu_memory_utilization,
            several_processes=state.num_processes > 1,
            **trust,
        )
        return engine, tokenizer, sequence_limit(config_of(model_args, **trust))
    template = args.template_for(suite)
    model, tokenizer = load_policy(model_args, suite, template, device=state.device, seed=args.seed, **trust)
    policy = SamplingPolicy(model, tokenizer, **sampling, reuse_prefixes=not protocol.is_windowed)
    return policy, tokenizer, sequence_limit(model.config)


def load_player(
    suite: TaskSuite,
    args: EvaluationArguments,
    model_args: ModelConfig,
    protocol: Protocol,
    shots: FewShot,
    max_length: int | None = None,
) -> tuple[Any, ContextBuilder]:
    """Loads the policy and creates the builder of its prompts; `max_length` is a limit in tokens below the model's.

    It is an `InputError` if a windowed prompt and its response can exceed the model's maximum sequence length.
    """
    policy, tokenizer, limit = load(suite, args, model_args, protocol)
    longest = min((each for each in (limit, max_length) if each), default=None)
    context = protocol_context(protocol, args, suite, tokenizer, shots, longest)
    if context.is_windowed and limit is not None:
        context.check_limit("max_position_embeddings", limit)
    context.end_ids = policy.eos_ids
    return policy, context


@dataclass
class Evaluation:
    """Plays lists in parts, each with its own random state, and stores the parts, unless `partial` is `None`.

    `samples` are episodes of the lists so far, for `epo-trl watch`.
    """

    suite: TaskSuite
    args: EvaluationArguments
    protocol: Protocol
    partial: PartialResults | None
    policy: Any = None  # without one, the player of `args` plays
    context: ContextBuilder | None = None
    samples: list[Sample] = field(default_factory=list)

    def report(self, split: str, task_ids: list[str]) -> EvalReport:
        """Evaluates a list and returns its report; `TooManyAborted` above `MAX_ABORTED_SHARE`. Collective."""
        state = PartialState()
        with progress_bar(len(task_ids), split) as bar:
            parts = self._play(split, task_ids, bar)
        if state.num_processes > 1:
            bare = [(part, [episode.without_tokens() for episode in played], s) for part, played, s in parts]
            parts = sorted(gather_object(bare), key=lambda part: part[0])
        episodes = [episode for _, played, _ in parts for episode in played]
        aborted = [episode for episode in episodes if episode.stop is StopReason.ABORTED]
        if len(aborted) > MAX_ABORTED_SHARE * len(episodes):
            errors = "; ".join(f"task {each.task_id!r}: {each.error}" for each in aborted[:SHOWN])
            raise TooManyAborted(
                f"{len(aborted)} of {len(episodes)} episodes of {split} were aborted. Parts without aborted episodes "
                f"are stored next to output, if set, and the same command replays the others. First errors: {errors}"
            )
        if state.is_main_process and self.args.show_episodes:
            print_episodes(episodes[: self.args.show_episodes])
        draw = random.Random(f"{self.args.seed} {split}")
        self.samples += choose_samples(episodes, self.args.keep_episodes, draw, split=split)
        seconds = sum(seconds for _, _, seconds in parts) / state.num_processes
        return EvalReport.from_episodes(
            episodes, protocol=self.protocol, suite=self.suite.name, split=split, seconds=seconds
        )

    def _play(self, split: str, task_ids: list[str], bar: Any) -> list[tuple[int, list[Episode], float]]:
        """Plays the parts of this process; returns number, episodes and seconds of each."""
        state, args, partial = PartialState(), self.args, self.partial
        # All processes get parts of equal size, with at most `parallel` episodes each.
        size = min(args.parallel, -(-len(task_ids) // state.num_processes))
        places = split_chunks(range(len(task_ids)), size)
        mine = range(state.process_index, len(places), state.num_processes)
        done = {number: played for number in mine if partial and (played := partial.read(f"{split}-{number}"))}
        bar.update(sum(len(episodes) for episodes, _ in done.values()))
        to_play = [number for number in mine if number not in done]
        at_once = isinstance(self.policy, Engine)  # plays all parts at once, each episode with seeds of its own

        def seeded(i: int) -> Any:
            if at_once:
                seed = random.Random(f"{args.seed} {split}").randrange(2**62)
                return self.policy.seeded(seed, [place for number in to_play for place in places[number]])
            # The seed depends on the part only, so a part is reproducible whatever ran before it, in any process.
            return self.policy.seeded(random.Random(f"{args.seed} {split} {to_play[i]}").randrange(2**62))

        chunks = [[task_ids[place] for place in places[number]] for number in to_play]
        settings = protocol_settings(self.protocol, require_think=args.require_think)
        common: Any = {"seed": args.seed, "on_finished": bar.update}
        if self.context is not None:
            playing = play_chunks(self.suite, chunks, seeded, self.context, settings, **common)
        else:
            make_player: Callable[[int], Expert] = self.suite.make_expert if args.player == EXPERT else RandomPlayer
            playing = play_scripted(self.suite, chunks, make_player, settings, **common)
        for number, (episodes, seconds) in zip(to_play, playing, strict=True):
            done[number] = episodes, seconds
            if partial and not any(episode.stop is StopReason.ABORTED for episode in episodes):  # those are replayed
                partial.keep(f"{split}-{number}", episodes, seconds)
        return [(number, *done[number]) for number in mine]


def evaluate(suite: TaskSuite, args: EvaluationArguments, model_args: ModelConfig) -> list[EvalReport]:
    """Plays the missing parts, writes and prints the reports, and returns them. Collective.

    Raises:
        InputError: If `output` is of another evaluation.
        RunningError: If another process evaluates to the same output.
    """
    state = PartialState(cpu=args.use_cpu)
    protocol = load_protocol(args, suite)
    lists = {split: sampled_tasks(suite, split, args.eval_episodes) for split in args.splits}
    others = read_reports(args.compare_to, suite.name, lists, game_settings(suite, lists)) if args.compare_to else None
    shots = few_shot_of(args, suite, protocol.env_options)
    protocol = protocol.varied(few_shot=shots.label)
    partial, note = None, ""
    with contextlib.ExitStack() as held:
        if args.output:
            path = Path(args.output).expanduser()  # no shell has done so for a YAML file
            if state.is_main_process:
                held.enter_context(place_lock(path, "output"))
            partial = PartialResults(path, result_settings(suite, args, model_args, protocol, lists))
        if partial is not None and partial.finished is not None:
            reports = [EvalReport.from_dict(report) for report in partial.finished["reports"]]
            note = f"{args.output} is finished; nothing was played"
        else:
            evaluation = Evaluation(suite, args, protocol, partial)
            if args.player == MODEL:
                evaluation.policy, evaluation.context = load_player(suite, args, model_args, protocol, shots)
                with contextlib.closing(suite.make_env()) as env:
                    check_first_task(env, next(iter(lists.values()))[0], args.seed, evaluation.context, protocol)
            reports = [evaluation.report(split, task_ids) for split, task_ids in lists.items()]
            if partial is not None and state.is_main_process:
                write_samples(evaluation_file(partial.output), [sample.to_dict() for sample in evaluation.samples])
                model = model_args.model_name_or_path if args.player == MODEL else args.player
                shown = evaluation.context.template.shown(shots.examples) if evaluation.context else ""
                reported = [report.to_dict() for report in reports]
                partial.finish({"model": model, "reports": reported, "examples": shown})
    if state.is_main_process:
        say(format_table(reports))
        if note:
            say(note)
        if others is not None:
            say(compare(reports, others, str(args.compare_to)))
    return reports


def main(line: CommandLine) -> None:
    """Parses the options and evaluates."""
    suite, args, model_args = parse_options(line, EvaluationArguments, ModelConfig)
    if args.player == MODEL:
        check_model_name(model_args.model_name_or_path)
    evaluate(suite, args, model_args)
    PartialState().wait_for_everyone()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
