"""`epo-trl play`: one episode in the terminal by a person, the environment's expert, or a model."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import ModelConfig

from epo_trl.bounds import option
from epo_trl.cli.command_line import CommandLine
from epo_trl.cli.evaluation import load_player
from epo_trl.cli.evaluation_arguments import EvaluationArguments, load_protocol
from epo_trl.cli.options import parse_options
from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.errors import InputError
from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import check_first_task, protocol_context, protocol_settings
from epo_trl.lab.screen import Screen, turns
from epo_trl.models.load import end_ids_of, tokenizer_of
from epo_trl.models.names import check_model_name, tiny_size
from epo_trl.rollout import ContextBuilder, Engine, InStep, PromptTemplate, Response
from epo_trl.rollout.demonstrations import ANSWER
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.rollout.spec import action_format
from epo_trl.types import Episode, StopReason

HUMAN, EXPERT = "human", "expert"
# For an environment without a default protocol.
PLAIN = Protocol(name="play", max_turns=50, history_length=2, temperature=1.0)
UNUSED = PromptTemplate("", first="", next="", history="", followup="")  # for a player that reads no prompts
END = "<|end|>"


@dataclass
class PlayArguments(EvaluationArguments):
    """Task and player. The options for lists, numbers of episodes and outputs of an evaluation have no effect."""

    player: str = option(HUMAN, "'human', 'expert' (the environment's own), or a model: a folder, a Hub id, or 'tiny'.")
    task_id: str | None = option(None, "Id of the task; by default the one at `index` in `split`.")
    split: str = option("train", "List of the task.")
    index: int = option(0, "Index of the task in the list, from 0.")
    show_prompt: bool = option(
        False,
        "Show the prompt of a model before each turn: with model_name_or_path in the format of that model, else the "
        "message without a chat template.",
    )

    @property
    def is_model(self) -> bool:
        """Whether the player is a model."""
        return self.player not in (HUMAN, EXPERT)


def main(line: CommandLine) -> None:
    """Parses the options and plays."""
    suite, args, model_args = parse_options(line, PlayArguments, ModelConfig)
    if args.is_model:
        check_model_name(args.player, "player", model_args.model_revision)
    play(suite, args, model_args, Screen())


def play(suite: TaskSuite, args: PlayArguments, model_args: ModelConfig, screen: Screen) -> Episode | None:
    """Plays an episode and returns it, or `None` if the person quits.

    Raises:
        EnvError: If the environment fails, or the task does not exist.
    """
    protocol, task_id = play_protocol(args, suite), find_task(args, suite)
    context, engine = open_player(suite, args, model_args, protocol)
    with contextlib.closing(suite.make_env()) as env:
        if args.is_model or args.show_prompt:
            check_first_task(env, task_id, args.seed, context, protocol)
        rules = protocol_settings(protocol, require_think=args.require_think)
        running = RunningEpisode(task_id, args.seed, env, rules)
        try:
            play_turns(running, suite, args, context, engine, screen)
        except (EOFError, KeyboardInterrupt):
            screen.say(f"stopped after {turns(len(running.turns))}; reward {total_reward(running):g}", "bold")
            return None
    if running.stop is StopReason.ABORTED:
        raise EnvError(f"{task_id}: {running.error}")
    screen.end(running.to_episode(), total_reward(running))
    return running.to_episode()


def play_turns(
    running: RunningEpisode, suite: TaskSuite, args: PlayArguments, context: ContextBuilder, engine: Engine | None,
    screen: Screen,
) -> None:  # fmt: skip
    """Plays a new episode to its end and shows it.

    Raises:
        EOFError: If the person quits or the input ends.
    """
    expert = suite.make_expert(args.seed) if args.player == EXPERT else None
    with running.aborted_by_errors():
        running.send_reset()
        running.await_answer()
        screen.start(running.task_id, running.info, running.settings.max_turns, args.player)
        screen.say(running.observation)
    if expert and running.stop is None:
        expert.reset(running.observation, running.info)
    while running.stop is None:
        number, before = len(running.turns) + 1, running.info
        (running.prompt,) = context.build([running.view()])
        if running.prompt is None:
            running.stop = StopReason.CONTEXT_FULL
            break
        if args.show_prompt:
            ids = running.ids_to_continue()
            screen.prompt(context.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if engine:
            engine.submit(0, running.ids_to_continue())
            (response,) = engine.collect(None) or []
        else:
            answer = expert.act(running.observation, before) if expert else ("", screen.ask_action(number, before))
            response = Response(0, encode_answer(context, *answer))
        (text,) = context.decode([response.ids])
        with running.aborted_by_errors():
            running.send_action(response.ids, text, response.logprobs, context)
            assert running.turn is not None
            screen.response(number, running.turn, context.answer_start + text, typed=args.player == HUMAN)
            running.await_answer()
            if running.is_sent:
                screen.outcome(running.observation, running.turns[-1].env_reward, running.info, before)


def total_reward(running: RunningEpisode) -> float:
    """Returns the sum of the environment's rewards so far."""
    return sum(turn.env_reward for turn in running.turns)


def encode_answer(context: ContextBuilder, thought: str, action: str) -> list[int]:
    """Returns the token ids of a response in the format required of a model."""
    answer = ANSWER.removeprefix(context.answer_start)
    (ids,) = context.encode(answer, [{"thought": thought, "action": action}])
    return [*ids, context.answer_end]


def play_protocol(args: EvaluationArguments, suite: TaskSuite) -> Protocol:
    """Returns the protocol of an evaluation, or `PLAIN` where the environment has no default."""
    if args.protocol or suite.protocol:
        return load_protocol(args, suite)
    return PLAIN.varied(max_turns=args.max_turns, temperature=args.temperature, context=args.context)


def find_task(args: PlayArguments, suite: TaskSuite) -> str:
    """Returns the id of the task.

    Raises:
        EnvError: If the list does not exist.
        InputError: If the list is empty, or the index is outside it.
    """
    if args.task_id is not None:
        return args.task_id
    suite.check_split(args.split)
    ids = suite.task_ids(args.split)
    if not ids:
        raise InputError(f"split: expected a list with tasks, got {args.split!r}, which is empty for {suite.name}")
    if not 0 <= args.index < len(ids):
        raise InputError(f"index: expected an integer from 0 to {len(ids) - 1}, got {args.index} for {args.split}")
    return ids[args.index]


def open_player(
    suite: TaskSuite, args: PlayArguments, model_args: ModelConfig, protocol: Protocol
) -> tuple[ContextBuilder, Engine | None]:
    """Returns the builder of the prompts, and the model's engine; `None` if the player is not a model."""
    if args.is_model:
        model_args.model_name_or_path = args.player
        shots = args.few_shot_of(suite, protocol.env_options)
        policy, context = load_player(suite, args, model_args, protocol, shots)
        policy = policy.seeded(args.seed)
        return context, policy if isinstance(policy, Engine) else InStep(policy)
    name, args = model_args.model_name_or_path, replace(args, action_format="tags")  # the format of `encode_answer`
    if not args.show_prompt:  # the prompts are empty: no history, and no length limit
        actions = action_format("tags", None, suite.tools, verbatim=suite.verbatim)
        return ContextBuilder(
            bare_tokenizer(), UNUSED, history_length=0, max_prompt_tokens=sys.maxsize, actions=actions
        ), None
    shots = args.few_shot_of(suite, protocol.env_options)
    if name is None or tiny_size(name):
        args = replace(args, max_prompt_length=sys.maxsize)
        return protocol_context(protocol, args, suite, bare_tokenizer(), shots), None
    tokenizer = tokenizer_of(model_args, args.trust_remote_code)
    context = protocol_context(protocol, args, suite, tokenizer, shots)
    if not context.is_windowed:  # reads the model's config, which windowed prompts do not need
        context.end_ids = end_ids_of(model_args, tokenizer, args.trust_remote_code)
    return context, None


def bare_tokenizer() -> Any:
    """Creates a tokenizer with one token per byte, whose chat template adds nothing to a message.

    It leaves prompts and actions unchanged, for a player without a tokenizer.
    """
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    return tokenizer
