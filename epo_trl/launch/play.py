"""The body of `epo-trl play`: one episode in the terminal by a person, the environment's expert, or a model."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from trl import ModelConfig

from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import check_first_task, protocol_settings
from epo_trl.launch.evaluation import load
from epo_trl.launch.evaluation_arguments import EvaluationArguments, context_of, load_protocol
from epo_trl.launch.options import parse_recipe
from epo_trl.launch.players import Person, Quit, Shown, Stage, bare_tokenizer, in_tokens
from epo_trl.launch.screen import Screen, turns
from epo_trl.models.load import tokenizer_of
from epo_trl.models.tiny import tiny_size
from epo_trl.rollout import ContextBuilder, PromptTemplate, play_episodes
from epo_trl.rollout.loop import Generate
from epo_trl.rollout.templates import TEMPLATES
from epo_trl.rollout.tool_calls import action_format
from epo_trl.types import Episode, StopReason

HUMAN, EXPERT = "human", "expert"
# For an environment without a default protocol.
PLAIN = Protocol(name="play", max_turns=50, history_length=2, temperature=1.0)
NOTHING = PromptTemplate("", first="", next="", history="", followup="")  # these prompts are not used


@dataclass
class PlayArguments(EvaluationArguments):
    """Task and player. The options for lists, numbers of episodes and outputs of an evaluation have no effect."""

    player: str = field(
        default=HUMAN,
        metadata={"help": "'human', 'expert' (the environment's own), or a model: a folder, a Hub id, or 'tiny'."},
    )
    task_id: str | None = field(
        default=None, metadata={"help": "Id of the task; by default the one at `index` in `split`."}
    )
    split: str = field(default="train", metadata={"help": "List of the task."})
    index: int = field(default=0, metadata={"help": "Index of the task in the list, from 0."})
    show_prompt: bool = field(
        default=False,
        metadata={
            "help": "Show the prompt of a model before each turn: with model_name_or_path in the format of that model, "
            "else the message without a chat template."
        },
    )
    prompt_template: str = field(
        default="",
        metadata={"help": "Prompt template; by default the one with the name of the environment, or 'general'."},
    )

    @property
    def is_model(self) -> bool:
        """Whether the player is a model."""
        return self.player not in (HUMAN, EXPERT)


def rules_of(args: EvaluationArguments, suite: TaskSuite) -> Protocol:
    """Returns the rules of an evaluation, or plain ones where the environment has none of its own."""
    if args.protocol or suite.protocol:
        return load_protocol(args, suite)
    return PLAIN.varied(max_turns=args.max_turns, temperature=args.temperature, context=args.context)


def task_of(args: PlayArguments, suite: TaskSuite) -> str:
    """Returns the id of the task.

    Raises:
        EnvError: If the list does not exist.
        ValueError: If the index is outside the list.
    """
    if args.task_id is not None:
        return args.task_id
    suite.check_split(args.split)
    ids = suite.task_ids(args.split)
    if not 0 <= args.index < len(ids):
        raise ValueError(f"index: expected an integer from 0 to {len(ids) - 1}, got {args.index} for {args.split}")
    return ids[args.index]


def template_of(args: PlayArguments, suite: TaskSuite) -> str:
    """Returns the name of the prompt template: that of the options, or the default of the environment."""
    own = suite.name.partition("-")[0]
    if suite.tools:
        own = "tools" if args.action_format == "tags" else args.action_format
    return args.prompt_template or (own if own.isidentifier() and (TEMPLATES / own).is_dir() else "general")


def load_player(
    suite: TaskSuite, args: PlayArguments, model_args: ModelConfig, protocol: Protocol
) -> tuple[ContextBuilder, Generate | None]:
    """Returns the builder of the prompts, and the model; `None` if the player is not a model."""
    if args.is_model:
        model_args.model_name_or_path = args.player
        policy, tokenizer, longest = load(suite, args, model_args, protocol)
        shots = args.few_shot_of(suite, protocol.env_options)
        context = context_of(args, suite, protocol, tokenizer, longest, shots)
        context.end_ids = policy.eos_ids
        return context, policy.seeded(args.seed)
    name, args = model_args.model_name_or_path, replace(args, action_format="tags")  # the format of a player's response
    if not args.show_prompt:
        # the prompts are empty: no history, and no length limit
        actions = action_format("tags", None, suite.tools, verbatim=suite.verbatim)
        return ContextBuilder(
            bare_tokenizer(), NOTHING, history_length=0, max_prompt_tokens=sys.maxsize, actions=actions
        ), None
    shots = args.few_shot_of(suite, protocol.env_options)
    if name is None or tiny_size(name):
        args = replace(args, max_prompt_length=sys.maxsize)
        return context_of(args, suite, protocol, bare_tokenizer(), None, shots), None
    return context_of(args, suite, protocol, tokenizer_of(model_args), None, shots), None


def play(suite: TaskSuite, args: PlayArguments, model_args: ModelConfig, screen: Screen) -> Episode | None:
    """Plays an episode and returns it, or `None` if the person quits.

    Args:
        suite: The tasks.
        args: Settings of the episode and its player.
        model_args: Model that plays, or whose prompts are shown.
        screen: Output of the episode.

    Raises:
        EnvError: If the environment fails, or the task does not exist.
    """
    protocol, task_id = rules_of(args, suite), task_of(args, suite)
    args = replace(args, prompt_template=template_of(args, suite))
    context, policy = load_player(suite, args, model_args, protocol)
    with contextlib.closing(suite.make_env()) as env:
        if args.is_model or args.show_prompt:
            check_first_task(env, task_id, args.seed, context, protocol)
        stage = Stage(env, screen, protocol.max_turns, args.player)
        plays = policy or in_tokens(_act(suite, args, stage), stage, context)
        shown = Shown(
            plays, stage, context, require_think=args.require_think, prompts=args.show_prompt,
            responses=args.player != HUMAN,
        )  # fmt: skip
        settings = protocol_settings(protocol, require_think=args.require_think)
        try:
            (episode,) = play_episodes([stage], [(task_id, args.seed)], shown, context, settings)
        except (Quit, KeyboardInterrupt):
            screen.say(f"stopped after {turns(stage.turns)}; reward {stage.reward:g}", "bold")
            return None
    if episode.stop is StopReason.ABORTED:
        raise EnvError(f"{task_id}: {episode.error}")
    screen.end(episode, stage.reward)
    return episode


def _act(suite: TaskSuite, args: PlayArguments, stage: Stage) -> Any:
    """Returns the act function of a person or the expert."""
    if args.player == HUMAN:
        return Person(stage.screen).act
    expert = suite.make_expert(args.seed)
    begun = False

    def act(observation: str, info: Any) -> tuple[str, str]:
        nonlocal begun
        if not begun:
            expert.reset(observation, info)
            begun = True
        return expert.act(observation, info)

    return act


def main() -> None:
    """Parses the command line and plays."""
    suite, args, model_args = parse_recipe(PlayArguments, ModelConfig)
    play(suite, args, model_args, Screen())
