"""One round of an audit: groups of episodes, the credit of some of their turns, and the true advantages of these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import nan
from random import Random
from statistics import fmean
from typing import Annotated, Any

from tqdm.auto import tqdm

from epo_trl.bounds import Count, Range, check_bounds
from epo_trl.envs.base import TaskSuite
from epo_trl.envs.border import close_all
from epo_trl.errors import InputError
from epo_trl.lab.credit_audit.estimators import build_batch, turn_credits
from epo_trl.methods import CriticValues, Method
from epo_trl.rollout import ContextBuilder, RolloutSettings
from epo_trl.rollout.engine import Generate, InStep
from epo_trl.rollout.loop import RolloutTimes, send_actions, set_prompts, take_answers
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.types import Episode, StopReason

State = tuple[int, int, bool]  # episode, turn, and whether the recorded response has been given
_SEEDS = 2**62


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """How much an audit plays."""

    group_size: Annotated[int, Range(least=2)] = 8  # episodes per task, which the credits compare
    audited: Count = 2  # episodes of a group whose turns are compared with their true advantages
    continuations: Annotated[int, Range(least=2)] = 16  # from each state; even, since two halves estimate the noise
    parallel: Count = 256  # episodes in one generation call
    scale: str = "group"  # `scale_rewards` of the run

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.continuations % 2:
            raise InputError(f"continuations: expected an even number >= 2, got {self.continuations}")


@dataclass(frozen=True, slots=True)
class Player:
    """What plays the episodes of an audit."""

    suite: TaskSuite
    policy: Generate
    context: ContextBuilder
    settings: RolloutSettings  # those of training
    seed: int = 0  # passed to every `reset`
    critic: Callable[[Sequence[Episode]], CriticValues] | None = None  # values of the run's critic, if it has one


def play_round(
    player: Player, tasks: Sequence[str], plan: AuditPlan, estimators: Mapping[str, Method], draw: Random
) -> dict[str, Any]:
    """Plays a round and returns it as JSON values, one entry of each list per audited turn.

    `task` is the task, `turn` the place of the turn in its episode, `halves` two independent estimates of its true
    advantage, `credits` the advantage by each estimator. `success` has one entry per episode. Tasks in which an
    environment raised an error are left out: `aborted` has the first error of each. `draw` seeds the environments and
    chooses the audited episodes.
    """
    episodes, points = record(player, [task for task in tasks for _ in range(plan.group_size)], plan.parallel, draw)
    copies = [point.env for each in points for point in each]
    aborted = {episode.task_id: episode.error for episode in episodes if episode.stop is StopReason.ABORTED}
    points = [each for each, episode in zip(points, episodes, strict=True) if episode.task_id not in aborted]
    episodes = [episode for episode in episodes if episode.task_id not in aborted]
    rows = [
        first + member
        for first in range(0, len(episodes), plan.group_size)
        for member in sorted(draw.sample(range(plan.group_size), plan.audited))
    ]
    turns = [(row, k) for row in rows for k in range(len(episodes[row].turns))]
    halves, failed = true_advantages(player, episodes, points, turns, plan)
    close_all(copies)
    kept = [i for i, (row, _) in enumerate(turns) if episodes[row].task_id not in failed]
    turns = [turns[i] for i in kept]
    credits: dict[str, list[float]] = {name: [] for name in estimators}
    if turns:
        critic = player.critic(episodes) if player.critic else None
        credits = turn_credits(estimators, build_batch(episodes, plan.group_size, plan.scale, critic), turns)
    return {
        "task": [episodes[row].task_id for row, _ in turns],
        "turn": [k for _, k in turns],
        "halves": [halves[i] for i in kept],
        "credits": credits,
        "success": [episode.won for episode in episodes],
        "aborted": aborted | failed,
    }


def record(
    player: Player, tasks: Sequence[str], parallel: int, draw: Random
) -> tuple[list[Episode], list[list[RunningEpisode]]]:
    """Plays one episode per task; returns them with a copy of each before every turn, whose environment stays open."""
    running = [RunningEpisode(task, player.seed, player.suite.make_env(), player.settings) for task in tasks]
    for episode in running:
        episode.env.reseed(draw.randrange(_SEEDS))
        with episode.aborted_by_errors():
            episode.start()
    points: dict[int, list[RunningEpisode]] = defaultdict(list)
    for ended in _play_to_end(iter(running), player, parallel, lambda each: points[id(each)].append(_branch(each))):
        close_all([ended.env])
    return [episode.to_episode() for episode in running], [points[id(episode)] for episode in running]


def true_advantages(
    player: Player,
    episodes: Sequence[Episode],
    points: Sequence[Sequence[RunningEpisode]],
    turns: Sequence[tuple[int, int]],
    plan: AuditPlan,
) -> tuple[list[tuple[float, float]], dict[str, str]]:
    """Estimates A = Q - V of turns twice, each time with half of the continuations.

    V is the mean return of fresh continuations by the same policy from a copy of the state before the turn, Q that of
    continuations after the recorded response. Returns are the sums of the training rewards to the end of the episode.

    Also returns the first error of each task in which an environment raised one; estimates that need it are NaN.
    `points` has a copy of each episode before each of its turns, `turns` the episode and turn of each advantage.
    """

    def state_after(row: int, k: int) -> State | None:
        """Returns the state after a turn, `None` if nothing can follow it.

        A deterministic environment leads to the recorded next state, whose continuations serve both turns. Any other
        is stepped again in each continuation.
        """
        if not points[row][k].env.is_deterministic:
            return (row, k, True)
        return (row, k + 1, False) if k + 1 < len(episodes[row].turns) else None

    before = {turn: (*turn, False) for turn in turns}
    after = {turn: state_after(*turn) for turn in turns}
    states = sorted({*before.values(), *(state for state in after.values() if state is not None)})
    returns: dict[tuple[State, int], list[float]] = defaultdict(list)
    owners: dict[int, tuple[State, int]] = {}
    errors: dict[str, str] = {}

    def copies() -> Iterator[RunningEpisode]:
        for row, k, responded in states:
            for number in range(plan.continuations):
                twin = _branch(points[row][k])
                if responded and twin.stop is None:
                    turn = episodes[row].turns[k]
                    with twin.aborted_by_errors():
                        twin.send_action(turn.response_ids, turn.response, turn.logprobs, player.context)
                        twin.await_answer()
                    twin.prompt = None
                # Halves by the order of the start: by that of the end, each would hold its share of short episodes.
                owners[id(twin)] = (row, k, responded), number % 2
                yield twin

    played = _play_to_end(copies(), player, plan.parallel)
    for ended in tqdm(played, "audit", plan.continuations * len(states), unit="continuation", leave=False):
        state, part = owners.pop(id(ended))
        earned = sum(turn.reward for turn in ended.turns[state[1] :])
        if ended.stop is StopReason.ABORTED:
            earned = nan
            errors.setdefault(ended.task_id, ended.error)
        returns[state, part].append(earned)
        close_all([ended.env])

    def advantage(turn: tuple[int, int], part: int) -> float:
        state = after[turn]
        # The continuations after a repeated response include the reward of that turn.
        paid = 0.0 if state is not None and state[2] else episodes[turn[0]].turns[turn[1]].reward
        return paid + (0.0 if state is None else fmean(returns[state, part])) - fmean(returns[before[turn], part])

    return [(advantage(turn, 0), advantage(turn, 1)) for turn in turns], errors


def _branch(episode: RunningEpisode) -> RunningEpisode:
    """Returns an independent copy of a running episode, with a copy of its environment. An error aborts the copy.

    A copy that is aborted shares the environment.
    """
    twin = replace(
        episode, turns=list(episode.turns), history=list(episode.history), carried_ids=list(episode.carried_ids)
    )
    if twin.stop is None:
        with twin.aborted_by_errors():
            twin.env = episode.env.copy()
    return twin


def _play_to_end(
    waiting: Iterator[RunningEpisode],
    player: Player,
    parallel: int,
    before_turn: Callable[[RunningEpisode], None] = lambda episode: None,
) -> Iterator[RunningEpisode]:
    """Plays episodes to their ends, `parallel` at a time, and yields each when it has ended.

    One that ends makes room for the next at once, so no generation call waits for the longest episode. `before_turn` is
    called with each episode before its turn, when its prompt is known.
    """
    engine, times = InStep(player.policy), RolloutTimes()
    running: list[RunningEpisode] = []
    while running := [*running, *islice(waiting, parallel - len(running))]:
        set_prompts([each for each in running if each.stop is None and each.prompt is None], player.context)
        active = [episode for episode in running if episode.stop is None]
        for number, episode in enumerate(active):
            before_turn(episode)
            engine.submit(number, episode.ids_to_continue())
        if responses := engine.collect(None):
            send_actions(active, responses, player.context, times)
            take_answers(active, range(len(active)), wait=False, for_all=True)
        for episode in active:
            episode.prompt = None
        yield from (episode for episode in running if episode.stop is not None)
        running = [episode for episode in running if episode.stop is None]
