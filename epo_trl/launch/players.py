"""Players of an episode in a terminal: a person, the environment's expert, or a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from epo_trl.envs.base import Info, TextEnv
from epo_trl.launch.screen import HELP, Screen
from epo_trl.rollout import ContextBuilder
from epo_trl.rollout.demonstrations import ANSWER
from epo_trl.rollout.loop import Generate

END = "<|end|>"
# These words show the help and cost no turn. If an environment has one of them as an action, /N chooses it.
ASKING = {"help", "?", "h", "quit", "exit", "actions"}
Act = Callable[[str, Info], tuple[str, str]]  # observation, info -> thought, action


class Quit(Exception):  # noqa: N818 - not an error: the person ends the game
    """The person quits."""


def bare_tokenizer() -> PreTrainedTokenizerFast:
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


class Stage(TextEnv):
    """Wraps an environment and shows its observations, rewards and scores.

    Args:
        env: Wrapped environment.
        screen: Output.
        max_turns: Turn limit, for the first line.
        player: Name of the player, for the first line.

    Attributes:
        observation: Last observation.
        info: Info dictionary of the last observation.
        turns: Number of actions so far.
        reward: Return so far.
    """

    def __init__(self, env: TextEnv, screen: Screen, max_turns: int, player: str) -> None:
        self.env, self.screen, self.max_turns, self.player = env, screen, max_turns, player
        self.observation, self.turns, self.reward = "", 0, 0.0
        self.info: Info = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """As the environment's."""
        self.observation, self.info = self.env.reset(seed=seed, options=options)
        self.screen.start((options or {})["task_id"], self.info, self.max_turns, self.player)
        self.screen.say(self.observation)
        return self.observation, self.info

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """As the environment's."""
        before = self.info
        self.observation, reward, terminated, truncated, self.info = self.env.step(action)
        self.turns, self.reward = self.turns + 1, self.reward + float(reward)
        self.screen.outcome(self.observation, float(reward), self.info, before)
        return self.observation, reward, terminated, truncated, self.info


class Shown:
    """Wraps a policy and shows its prompts and responses. Fits `epo_trl.rollout.loop.Generate`.

    Args:
        generate: The policy.
        stage: Stage that the episode runs on.
        context: Builder of its prompts.
        require_think: Whether a response without reasoning is invalid.
        prompts: Whether to show prompts.
        responses: Whether to show responses; false for a person, who has just typed them.
    """

    def __init__(
        self, generate: Generate, stage: Stage, context: ContextBuilder, *, require_think: bool, prompts: bool,
        responses: bool,
    ) -> None:  # fmt: skip
        self.generate, self.stage, self.context = generate, stage, context
        self.require_think, self.prompts, self.responses = require_think, prompts, responses
        self.turn = 0

    def __call__(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
        """Shows and returns the response to the only prompt."""
        self.turn += 1
        tokenizer, screen = self.context.tokenizer, self.stage.screen
        if self.prompts:
            screen.prompt(tokenizer.decode(prompt_ids[0]))
        answers = self.generate(prompt_ids)
        text = tokenizer.batch_decode(answers[0], skip_special_tokens=True)[0]
        listed = self.stage.info["admissible_actions"]
        parsed = self.context.read(answers[0][0], text, listed, require_think=self.require_think)
        text = self.context.answer_start + text
        if self.responses:
            screen.response(self.turn, parsed, text)
        elif not parsed.is_valid:
            screen.invalid(parsed)
        return answers


def in_tokens(act: Act, stage: Stage, context: ContextBuilder) -> Generate:
    """Wraps a player as a policy, which responds to every prompt in the format required of a model.

    Args:
        act: Act function of the player.
        stage: Stage that the episode runs on.
        context: Builder of the prompts, with the tokenizer.
    """

    def generate(prompt_ids: list[list[int]]) -> tuple[list[list[int]], None]:
        thought, action = act(stage.observation, stage.info)
        answer = ANSWER.removeprefix(context.answer_start)
        (ids,) = context.encode(answer, [{"thought": thought, "action": action}])
        return [[*ids, context.tokenizer.eos_token_id]], None

    return generate


class Person:
    """A person at the terminal."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.turn = 0

    def act(self, observation: str, info: Info) -> tuple[str, str]:
        """Returns an empty thought and the typed action.

        Raises:
            Quit: If the person quits or the input ends.
        """
        if self.turn == 0:
            self.screen.say(HELP, "dim")
        self.turn += 1
        while True:
            try:
                typed = self.screen.ask(self.turn)
            except EOFError:
                raise Quit from None
            if typed == "/quit":
                raise Quit
            if typed == "/actions":
                self.screen.actions(info["admissible_actions"])
            elif typed and (action := self._action(typed, info["admissible_actions"])):
                return "", action
            else:
                self.screen.say(HELP, "dim")

    def _action(self, typed: str, actions: Any) -> str:
        """Returns the action, `""` if the input is not an action."""
        if typed.lower() in ASKING:
            return ""
        if not typed.startswith("/"):
            return typed
        number = int(typed[1:]) if typed[1:].isdecimal() else 0
        return actions[number - 1] if 0 < number <= len(actions or ()) else ""
