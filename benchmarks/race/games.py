"""The games, texts and rules that all systems of the race share. Imports neither torch nor a trainer."""

from __future__ import annotations

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.base import Info
from epo_trl.rollout import RolloutSettings
from epo_trl.rollout.templates import PromptTemplate, render
from epo_trl.trainers.trl_environment import SuiteEnvironment

TURNS = 15
EPISODES = 64  # per RL step
GROUP = 8  # episodes of one task, for GRPO
RESPONSE_TOKENS = 12
EPISODE_TOKENS = 2048  # a limit that no episode reaches
PROMPT = "plain"  # task and observations only
TEMPLATE = PromptTemplate.load(PROMPT)
OVER = "The episode is over."  # what an agent reads after the last action, where its trainer asks for one more answer
RULES = RolloutSettings(max_turns=TURNS, success_reward=1.0, invalid_action_penalty=0.0, require_think=False)


def make_suite() -> GeneratedAlfworld:
    """Creates the games: put one object into or onto a receptacle, in small bedrooms and bathrooms."""
    return GeneratedAlfworld(
        n_train=16000, n_iid=100, n_ood=0, task_types=["pick_and_place_simple"], room_types=["bedrooms", "bathrooms"],
        max_receptacles=8,
    )  # fmt: skip


def message(observation: str, info: Info, *, is_first: bool) -> str:
    """Returns the text that the agent reads, the same for every system."""
    return render(TEMPLATE.first if is_first else TEMPLATE.followup, {**info, "observation": observation})


def read_action(response: str) -> str:
    """Returns the text between the tags; `""` if there is none."""
    _, opened, rest = response.partition("<action>")
    action, closed, _ = rest.partition("</action>")
    return action.strip() if opened and closed else ""


class House(SuiteEnvironment):
    """A game in TRL's format: `act` is its only tool."""

    def __init__(self, suite: GeneratedAlfworld) -> None:
        super().__init__(suite, RULES, lambda seen, info: message(seen, info, is_first=not self.turns))

    def reset(self, task_id: str, seed: int = 0, **_: object) -> str:
        """Starts an episode and returns the first message."""
        return super().reset(task_id, seed).partition("\n")[2]

    def act(self, action: str) -> str:
        """
        Take one action in the world.

        Args:
            action: The action as text

        Returns:
            What you see then.
        """
        seen = super().act(action)
        return OVER if self.done else seen
