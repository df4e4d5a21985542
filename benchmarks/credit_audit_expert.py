"""Credits against true advantages for a scripted player of ALFWorld-style games, on one core.

python benchmarks/credit_audit_expert.py --noise 0.3 0.6 --seeds 0 1 2 --out results/credit_audit/expert.json

The player is ALFWorld's expert, which takes a random admissible action with probability `noise`. It costs no model, so
the audit has many turns. `epo-trl audit-credit` does the same for a trained policy.
"""

import argparse
import json
import random
import time
from copy import copy
from dataclasses import asdict
from pathlib import Path

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.base import TaskSuite, TextEnv
from epo_trl.lab.credit_audit import AuditPlan, Player, compare, list_estimators, play_round
from epo_trl.lab.credit_audit.statistics import ranked, summary
from epo_trl.lab.play import bare_tokenizer
from epo_trl.rollout import ContextBuilder, PromptTemplate, RolloutSettings
from epo_trl.rollout.demonstrations import ACTION

GO = "go on"  # the only action that the rollout sees: the game below chooses the real one
MEMORY = {"_seen": dict, "_looked": set, "_treated": set}  # what the expert changes in place


class SelfPlayed(TextEnv):
    """A game that plays itself by the noisy expert. A copy continues with random numbers of its own.

    Args:
        suite: The games.
        noise: Probability of a random admissible action.
        source: Random numbers from which those of the game and of its copies are seeded.
    """

    is_deterministic = True  # a recorded turn leads to the recorded next state

    def __init__(self, suite: TaskSuite, noise: float, source: random.Random) -> None:
        self._suite, self._noise, self._source = suite, noise, source
        self._env, self._expert = suite.make_env(), suite.make_expert(source.randrange(2**32))
        self._random = random.Random(source.random())

    def reset(self, *, seed=None, options=None):
        self._seen = self._env.reset(seed=seed, options=options)
        self._expert.reset(*self._seen)
        return self._seen[0], self._shown(self._seen[1])

    def step(self, action):
        planned = self._expert.act(*self._seen)[1]
        listed = self._seen[1]["admissible_actions"]
        chosen = self._random.choice(listed) if self._random.random() < self._noise else planned
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        self._seen = observation, info
        return observation, reward, terminated, truncated, self._shown(info)

    def copy(self):
        twin = copy(self)
        twin._env, twin._expert = self._env.copy(), copy(self._expert)
        for name, kind in MEMORY.items():
            setattr(twin._expert, name, kind(getattr(self._expert, name)))
        twin._random = random.Random(self._source.random())
        twin._expert._random = random.Random(self._source.random())
        return twin

    @staticmethod
    def _shown(info):
        return {**info, "admissible_actions": (GO,)}


class SelfPlayedSuite(TaskSuite):
    """Games that play themselves."""

    name = "alfworld-generated-expert"

    def __init__(self, games: TaskSuite, noise: float, seed: int) -> None:
        self._games, self._noise, self._source = games, noise, random.Random(f"{seed} {noise}")

    def task_ids(self, split):
        return self._games.task_ids(split)

    def make_env(self):
        return SelfPlayed(self._games, self._noise, self._source)


def audit(noise: float, seed: int, args: argparse.Namespace) -> list[dict]:
    """Returns the rounds of one seed."""
    games = GeneratedAlfworld(n_train=400, seed=seed, task_types=args.types, max_receptacles=args.max_receptacles)
    tokenizer = bare_tokenizer()
    context = ContextBuilder(
        tokenizer, PromptTemplate("", first="", next="", history="", followup=""), history_length=0
    )
    answer = [*context.encode(ACTION, [{"action": GO}])[0], tokenizer.eos_token_id]
    settings = RolloutSettings(max_turns=args.max_turns, require_think=False, env_options={"state_key": True})
    player = Player(
        SelfPlayedSuite(games, noise, seed), lambda prompts: ([answer] * len(prompts), None), context, settings
    )
    estimators, _ = list_estimators(state_keys=True, gae=None)
    plan, draw = AuditPlan(continuations=args.continuations, parallel=64), random.Random(seed)
    tasks = draw.sample(list(games.task_ids("train")), args.tasks)
    return [
        play_round(player, tasks[first : first + args.round], plan, estimators, draw)
        for first in range(0, args.tasks, args.round)
    ]


def comparison_of(rounds: list[dict]):
    """Returns the comparison over the turns of some rounds."""
    credits = {name: [x for one in rounds for x in one["credits"][name]] for name in rounds[0]["credits"]}
    return compare(
        credits, [pair for one in rounds for pair in one["halves"]], [t for one in rounds for t in one["task"]]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.3, 0.6])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--round", type=int, default=8)
    parser.add_argument("--continuations", type=int, default=16)
    parser.add_argument("--max_turns", type=int, default=20)
    parser.add_argument("--max_receptacles", type=int, default=16)
    parser.add_argument("--types", nargs="+", default=None)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    report = []
    for noise in args.noise:
        together = []
        for seed in args.seeds:
            begin = time.process_time()
            rounds = audit(noise, seed, args)
            for one in rounds:
                one["task"] = [f"seed {seed} {task}" for task in one["task"]]
            together += rounds
            report.append({"noise": noise, "seed": seed, **facts(rounds, time.process_time() - begin)})
        report.append({"noise": noise, "seed": "all", **facts(together, 0.0)})
        found = comparison_of(together)
        print(f"\nnoise {noise:g}, success {report[-1]['success']:.0%}. {summary(found)}\n")
        for name, each in ranked(found):
            print(f"| {name} | {each.correlation} | {each.gain} | {each.sign} | {each.silent:.0%} |")
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")


def facts(rounds: list[dict], seconds: float) -> dict:
    """Returns the numbers of some rounds as JSON values."""
    success = [won for one in rounds for won in one["success"]]
    return {"success": sum(success) / len(success), "cpu_seconds": round(seconds), **asdict(comparison_of(rounds))}


if __name__ == "__main__":
    main()
