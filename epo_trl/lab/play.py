"""`epo-trl play`: one episode in the terminal by a person, the environment's expert, or a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import ModelConfig

from epo_trl.bounds import option
from epo_trl.cli.base import say
from epo_trl.cli.evaluation import EvaluationArguments, load_player, load_protocol
from epo_trl.cli.options import CommandLine, parse_options
from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError, spelled
from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import check_first_task, protocol_context, protocol_settings
from epo_trl.models.load import check_model_name, tiny_size, tokenizer_of
from epo_trl.rollout import ContextBuilder, Engine, InStep
from epo_trl.rollout.demonstrations import few_shot_of
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.types import Episode, StopReason

HUMAN, EXPERT = "human", "expert"
# For an environment without a default protocol.
PLAIN = Protocol(name="play", max_turns=50, history_length=2, temperature=1.0)
HELP = "Type an action, or: /actions lists the admissible actions, /3 chooses the third, /quit, /help"


@dataclass
class PlayArguments(EvaluationArguments):
    """Task and player. The options for lists, numbers of episodes and outputs of an evaluation have no effect."""

    player: str = option(HUMAN, "'human', 'expert' (the environment's own), or a model: a folder, a Hub id, or 'tiny'.")
    task_id: str | None = option(None, "Id of the task; by default the one at `index` in `split`.")
    split: str = option("train", "List of the task.")
    index: int = option(0, "Index of the task in the list, from 0.")
    show_prompt: bool = option(
        False,
        "Show what each turn adds to the prompt of a model: with model_name_or_path in the format of that model, else "
        "without a chat template.",
    )

    @property
    def is_model(self) -> bool:
        """Whether the player is a model."""
        return self.player not in (HUMAN, EXPERT)


def main(line: CommandLine) -> None:
    """Parses the options and plays."""
    suite, args, model_args = parse_options(line, PlayArguments, ModelConfig)
    if args.is_model:
        check_model_name(args.player, "player")
    play(suite, args, model_args)


def show(text: str) -> None:
    """Writes a text of an environment or a model, escaped: it is data."""
    say(spelled(text))


def ask(turn: int, actions: Sequence[str]) -> str:
    """Asks a person for an action, with help before the first turn. Raises `EOFError` if the person quits."""
    if turn == 1:
        say(HELP)
    while True:
        typed = input(f"{turn}> ").strip()
        number = int(typed[1:]) if typed[1:].isdecimal() else 0
        if typed == "/quit":
            raise EOFError
        if typed.startswith("/") and 0 < number <= len(actions):
            return actions[number - 1]
        if typed and not typed.startswith("/"):
            return typed
        listed = [f"{number:4}  {action}" for number, action in enumerate(actions, start=1)]
        show("\n".join(listed or ["(none listed)"]) if typed == "/actions" else HELP)


def show_turn(episode: RunningEpisode, *, typed: bool) -> None:
    """Writes the last turn: the response, if no person has typed it, and the environment's answer to it."""
    turn = episode.turns[-1]
    if turn.thought and not typed:
        show(f"thought: {turn.thought}")
    if not typed:
        show(f"{len(episode.turns)}> {turn.action if turn.is_valid else turn.response}")
    if not turn.is_valid:
        show(f"invalid: {turn.error}")
    show(episode.observation)
    if turn.env_reward:
        say(f"reward {turn.env_reward:g}")


def play(suite: TaskSuite, args: PlayArguments, model_args: ModelConfig) -> Episode | None:
    """Plays an episode and returns it, or `None` if the person quits. What the environment raises is not caught."""
    if (task_id := args.task_id) is None:
        suite.check_split(args.split)
        ids = suite.task_ids(args.split)
        if not 0 <= args.index < len(ids):
            raise InputError(f"index: expected one of the {len(ids)} tasks of {args.split!r}, from 0, got {args.index}")
        task_id = ids[args.index]
    if args.protocol or suite.protocol:
        protocol = load_protocol(args, suite)
    else:
        protocol = PLAIN.varied(max_turns=args.max_turns, temperature=args.temperature, context=args.context)
    context, engine = open_player(suite, args, model_args, protocol)
    with contextlib.closing(suite.make_env()) as env:
        if context:
            check_first_task(env, task_id, args.seed, context, protocol)
        rules = protocol_settings(protocol, require_think=args.require_think)
        episode = RunningEpisode(task_id, args.seed, env, rules)
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            play_turns(episode, suite, args, context, engine)
    ended = None if episode.stop is None else episode.to_episode()
    outcome = "won" if ended and ended.won else f"not won ({ended.stop.value})" if ended else "\nstopped"
    count, reward = len(episode.turns), sum(turn.env_reward for turn in episode.turns)
    parts = [f"{outcome} after {count} turn{'' if count == 1 else 's'}; reward {reward:g}"]
    if ended and ended.score is not None:
        parts.append(f"score {ended.score:g}")
    if ended and ended.invalid_actions:
        parts.append(f"invalid actions: {ended.invalid_actions}")
    say("; ".join(parts))
    return ended


def play_turns(
    episode: RunningEpisode, suite: TaskSuite, args: PlayArguments, context: ContextBuilder | None,
    engine: Engine | None,
) -> None:  # fmt: skip
    """Plays a new episode to its end and shows it. Raises `EOFError` if the person quits or the input ends."""
    expert = suite.make_expert(args.seed) if args.player == EXPERT else None
    episode.start()
    show(f"task: {episode.info['task']}")
    about = f"{episode.info['task_type']}, {episode.task_id}; at most {episode.settings.max_turns} turns"
    show(f"{about}; player: {args.player}")
    show(episode.observation)
    if expert:
        expert.reset(episode.observation, episode.info)
    while episode.stop is None:
        if context:
            (episode.prompt,) = context.build([episode.view()])
            if episode.prompt is None:
                episode.stop = StopReason.CONTEXT_FULL
                break
            if args.show_prompt:
                text = context.tokenizer.decode(episode.prompt.ids, clean_up_tokenization_spaces=False)
                show(f"--- prompt\n{text}\n---")
        if engine and context:
            engine.submit(0, episode.ids_to_continue())
            (response,) = engine.collect(None) or []
            (text,) = context.decode([response.ids])
            episode.send_action(response.ids, text, response.logprobs, context)
            episode.await_answer()
        else:
            info, number = episode.info, len(episode.turns) + 1
            listed = info["admissible_actions"] or ()
            thought, action = expert.act(episode.observation, info) if expert else ("", ask(number, listed))
            episode.act(action, thought=thought, verbatim=suite.verbatim or bool(suite.tools))
        show_turn(episode, typed=args.player == HUMAN)


def open_player(
    suite: TaskSuite, args: PlayArguments, model_args: ModelConfig, protocol: Protocol
) -> tuple[ContextBuilder | None, Engine | None]:
    """Returns the builder of the prompts, if a model reads them or they are shown, and the engine of a model."""
    if not args.is_model and not args.show_prompt:
        return None, None
    shots = few_shot_of(args, suite, protocol.env_options)
    if args.is_model:
        model_args.model_name_or_path = args.player
        policy, context = load_player(suite, args, model_args, protocol, shots)
        policy = policy.seeded(args.seed)
        return context, policy if isinstance(policy, Engine) else InStep(policy)
    if (name := model_args.model_name_or_path) is None or tiny_size(name):
        args, tokenizer = replace(args, action_format="tags", max_prompt_length=sys.maxsize), bare_tokenizer()
    else:
        tokenizer = tokenizer_of(model_args, args.trust_remote_code)
    return protocol_context(protocol, args, suite, tokenizer, shots), None


def bare_tokenizer() -> Any:
    """Creates a tokenizer with one token per byte, whose chat template adds nothing to a message."""
    end, vocabulary = "<|end|>", {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    return tokenizer
