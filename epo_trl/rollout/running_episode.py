"""A running episode: its last observation, its past turns, and the turn in progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from epo_trl.envs.base import Info, TextEnv
from epo_trl.envs.border import checked_answer, checked_outcome, ends_episode_alone, error_text, find_action
from epo_trl.rollout.context import ContextBuilder, Prompt, TurnView
from epo_trl.rollout.parsing import NOT_ADMISSIBLE
from epo_trl.rollout.spec import RolloutSettings
from epo_trl.rollout.templates import PastTurn
from epo_trl.types import Episode, StopReason, Turn

NOT_ACCEPTED = "the environment does not know this action"


@dataclass(slots=True)
class RunningEpisode:
    """One running episode. It has ended when `stop` is set.

    Args:
        task_id: Id of the task.
        seed: Seed for `reset`.
        env: Environment that plays only this episode.
        settings: Rules of the rollout.
    """

    task_id: str
    seed: int
    env: TextEnv
    settings: RolloutSettings
    observation: str = ""
    info: Info = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    history: list[PastTurn] = field(default_factory=list)
    carried_ids: list[int] = field(default_factory=list)  # tokens that precede the next prompt
    prompt: Prompt | None = None  # of the turn in progress
    turn: Turn | None = None  # the turn in progress, still without its outcome; `None` before the first
    is_sent: bool = False  # whether the environment was asked for an answer
    stop: StopReason | None = None
    error: str = ""

    @contextlib.contextmanager
    def aborted_by_errors(self) -> Iterator[None]:
        """Aborts only this episode at an exception; Ctrl-C still ends the run."""
        try:
            yield
        except BaseException as error:
            if not ends_episode_alone(error):
                raise
            self.stop, self.error = StopReason.ABORTED, error_text(error)

    def view(self) -> TurnView:
        """Returns the input for the next prompt."""
        return TurnView(
            observation=self.observation,
            info=self.info,
            history=self.history,
            last_response_ids=self.turns[-1].response_ids if self.turns else (),
            context_tokens=len(self.carried_ids),
        )

    def start(self) -> None:
        """Requests the first observation and waits for it."""
        self.send_reset()
        self.await_answer()

    def act(self, text: str, *, thought: str = "", verbatim: bool = False) -> Turn:
        """Takes a turn with the action of a person or a script, and returns it with its outcome but without token ids.

        Args:
            text: The action; a listed one is sent in the environment's own spelling.
            thought: Reasoning, which later prompts may show.
            verbatim: Whether an unlisted action keeps its white space.
        """
        action, is_valid = find_action(text, self.info["admissible_actions"], verbatim=verbatim)
        error = "" if is_valid else NOT_ADMISSIBLE
        self._send(Turn((), (), text, self.observation, action, is_valid, error=error, thought=thought))
        self.await_answer()
        return self.turns[-1]

    def send_reset(self) -> None:
        """Requests the first observation from the environment."""
        self.is_sent = True
        self.env.reset_async(seed=self.seed, options={**self.settings.env_options, "task_id": self.task_id})

    def await_answer(self) -> None:
        """Awaits the first observation, or the outcome of the last action."""
        if self.turn is None:
            self.observation, self.info = checked_answer(*self.env.reset_wait())
        else:
            self._await_outcome(self.turn)

    def ids_to_continue(self) -> list[int]:
        """Returns the token ids that the policy continues."""
        assert self.prompt is not None
        return self.carried_ids + self.prompt.ids

    def send_action(
        self, ids: Sequence[int], text: str, logprobs: Sequence[float] | None, context: ContextBuilder
    ) -> None:
        """Parses the action in a response to `prompt` and sends it to the environment."""
        assert self.prompt is not None
        self.carried_ids = context.carried(self.carried_ids, self.prompt, ids)
        listed = self.info["admissible_actions"]
        parsed = context.read(ids, text, listed, require_think=self.settings.require_think)
        turn = Turn(
            prompt_ids=tuple(self.prompt.ids),
            response_ids=tuple(ids),
            response=text,
            observation=self.observation,
            action=parsed.action,
            is_valid=parsed.is_valid,
            logprobs=None if logprobs is None else tuple(logprobs),
            dropped_turns=self.prompt.dropped_turns,
            error=parsed.error,
            thought=parsed.thought,
            state_key=self.info.get("state_key") or "",
        )
        self._send(turn)

    def _send(self, turn: Turn) -> None:
        self.turn = turn
        self.is_sent = turn.is_valid or self.settings.invalid_action == "pass"
        if self.is_sent:
            self.env.step_async(turn.action)

    def has_answer(self) -> bool:
        """Whether the environment's answer is available without waiting, or the episode has ended."""
        return self.stop is not None or not self.is_sent or self.env.has_answer()

    def _await_outcome(self, turn: Turn) -> None:
        """Awaits the outcome of the action, computes the reward and records the turn."""
        observation, env_reward, terminated, truncated, info = self.observation, 0.0, False, False, self.info
        if self.is_sent:
            observation, env_reward, terminated, truncated, info = checked_outcome(*self.env.step_wait())
            if turn.is_valid and not info.get("accepted", True):
                turn = replace(turn, is_valid=False, error=str(info.get("refusal") or NOT_ACCEPTED))
        won = self.settings.is_won(terminated, truncated, info)
        reward = self.settings.reward(env_reward, won=won, is_valid=turn.is_valid)
        self.turns.append(replace(turn, reward=reward, env_reward=env_reward))
        self.history.append(PastTurn(turn.observation, turn.action, turn.thought))
        self.observation, self.info = observation, info
        if won:
            self.stop = StopReason.WON
        elif terminated:
            self.stop = StopReason.LOST
        elif truncated:
            self.stop = StopReason.TRUNCATED
        elif len(self.turns) >= self.settings.max_turns:
            self.stop = StopReason.TURN_LIMIT

    def to_episode(self) -> Episode:
        """Returns the finished episode."""
        assert self.stop is not None
        score = self.info.get("score")
        return Episode(
            task_id=self.task_id,
            task=self.info.get("task", ""),
            task_type=self.info.get("task_type", ""),
            turns=tuple(self.turns),
            stop=self.stop,
            won=self.stop is StopReason.WON,
            final_observation=self.observation,
            error=self.error,
            seed=self.seed,
            score=None if score is None else float(score),
            final_info=self.info,
        )
