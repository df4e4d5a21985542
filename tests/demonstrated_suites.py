"""Suites whose experts tests let demonstrate."""

from rollout_parts import ScriptedEnv

from epo_trl.envs.base import TaskSuite
from epo_trl.envs.toy import ToySuite
from epo_trl.rollout import RolloutSettings, play_episodes

TASKS = [(f"train/{i}", i) for i in range(6)]


def play_like(suite, context, demonstrations, **rules):
    """Returns the episodes of `TASKS` of a policy that answers as demonstrated, and all prompts that it was given."""
    asked = []

    def like_the_expert(prompt_ids):
        turn = len(asked)
        asked.append(prompt_ids)
        return [episode[turn].response_ids for episode in demonstrations if len(episode) > turn], None

    envs = [suite.make_env() for _ in TASKS]
    episodes = play_episodes(envs, TASKS, like_the_expert, context, RolloutSettings(max_turns=7, **rules))
    return episodes, [ids for prompts in asked for ids in prompts]


class LineSuite(TaskSuite):
    """One game after the other from a list; the expert always goes."""

    name = "line"

    def __init__(self, *games):
        self.env = ScriptedEnv()
        self.games = list(games)
        self.closed = 0
        reset, self.env.close = self.env.reset, self.close

        def next_game(**kwargs):
            self.env.answers = list(self.games.pop(0))
            return reset(**kwargs)

        self.env.reset = next_game

    def close(self):
        self.closed += 1

    def task_ids(self, split):
        return ["train/0"]

    def make_env(self):
        return self.env

    def make_expert(self, seed=0):
        return self

    def reset(self, observation, info):
        pass

    def act(self, observation, info):
        return f"I see {observation}", "go"


class Recorded(ToySuite):
    """Keeps what its environments were asked to do, and what the expert said."""

    def __init__(self):
        super().__init__()
        self.played, self.said = [], []

    def make_env(self):
        env = super().make_env()
        reset, step_ = env.reset, env.step

        def reset_and_note(**kwargs):
            observation, first = reset(**kwargs)
            self.played.append([])
            self.allowed = first["admissible_actions"]
            return observation, first

        def step_and_note(action):
            self.played[-1].append((action, action in self.allowed))
            answer = step_(action)
            self.allowed = answer[4]["admissible_actions"]
            return answer

        env.reset, env.step = reset_and_note, step_and_note
        return env

    def make_expert(self, seed=0):
        expert = super().make_expert(seed)
        act, said = expert.act, []
        self.said.append(said)

        def act_and_note(observation, about):
            thought, action = act(observation, about)
            said.append(action)
            return thought, action

        expert.act = act_and_note
        return expert
