"""Rollouts without a barrier: episodes go on at their own pace, and are the same in whatever order answers come."""

import hashlib
import random

import pytest
from hypothesis import given, settings, strategies
from rollout_parts import LOSE, WIN, ScriptedEnv, answer, byte_tokenizer, context_of, ids_of, step

from epo_trl.rollout import Engine, Response, RolloutSettings, play_episodes
from epo_trl.types import StopReason

TOKENIZER = byte_tokenizer()


def response_to(prompt_ids):
    """Returns the token ids of a response that depends on the prompt alone; one in four is invalid."""
    digest = hashlib.sha256(repr(prompt_ids).encode()).hexdigest()
    text = "no action" if digest[0] in "0123" else answer("look" if digest[1] in "01234567" else "go", digest[:6])
    return [*ids_of(TOKENIZER, text), TOKENIZER.eos_token_id]


def respond_in_step(prompts):
    return [response_to(ids) for ids in prompts], [[-1.0] * len(response_to(ids)) for ids in prompts]


class AnyOrder(Engine):
    """Gives some of the pending responses at each call, in a random order, and checks that no request is made twice."""

    def __init__(self, seed, at_most=3):
        self.draw, self.at_most = random.Random(seed), at_most
        self.pending, self.largest = {}, 0

    def submit(self, number, prompt_ids):
        assert number not in self.pending
        self.pending[number] = response_to(prompt_ids)
        self.largest = max(self.largest, len(self.pending))

    def collect(self, seconds):
        assert self.pending, "asked for responses although there is no request"
        count = self.draw.randint(0 if seconds is not None else 1, self.at_most)
        numbers = self.draw.sample(sorted(self.pending), min(count, len(self.pending)))
        return [Response(i, ids := self.pending.pop(i), [-1.0] * len(ids)) for i in numbers]


class LateEnv(ScriptedEnv):
    """Has its answer only after it was asked for it a few times, like a game in another process."""

    def __init__(self, *answers, draw, **kwargs):
        super().__init__(*answers, **kwargs)
        self.draw, self.looks = draw, 0

    def step_async(self, action):
        self.looks = self.draw.randint(0, 3)
        super().step_async(action)

    def has_answer(self):
        self.looks -= 1
        return self.looks < 0


def envs(seed, count, late):
    """Returns environments that win, lose, fail or go on, the same for the same seed."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        turns = [step(f"room {draw.randrange(9)}") for _ in range(draw.randrange(5))]
        end = draw.choice([[WIN], [LOSE], [OSError("broken")], []])
        start = {"start": OSError("no game")} if draw.random() < 0.1 else {}
        made.append(LateEnv(*turns, *end, draw=late, **start))
    return made


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    seed=strategies.integers(0, 2**20),
    count=strategies.integers(0, 7),
    mode=strategies.sampled_from(["windowed", "concatenated"]),
    invalid=strategies.sampled_from(["pass", "skip"]),
)
def test_the_episodes_do_not_depend_on_the_order_of_the_answers(seed, count, mode, invalid):
    tasks = [(f"task/{i}", i) for i in range(count)]
    rules = RolloutSettings(max_turns=4, invalid_action=invalid)
    context = context_of(TOKENIZER, mode)
    expected = play_episodes(envs(seed, count, random.Random(0)), tasks, respond_in_step, context, rules)
    finished = []
    played = play_episodes(
        envs(seed, count, random.Random(seed + 1)), tasks, AnyOrder(seed), context, rules, on_finished=finished.append
    )
    assert played == expected and sum(finished) == count


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=strategies.integers(0, 2**20), count=strategies.integers(1, 9), seats=strategies.integers(1, 4))
def test_a_free_environment_plays_the_next_task(seed, count, seats):
    """Each environment replays the script of the task that it is reset to, so the episodes are those of one each."""
    tasks = [(f"task/{i}", i) for i in range(count)]
    rules, context = RolloutSettings(max_turns=4), context_of(TOKENIZER)
    expected = play_episodes(envs(seed, count, random.Random(0)), tasks, respond_in_step, context, rules)
    scripts = {f"task/{i}": env for i, env in enumerate(envs(seed, count, random.Random(0)))}

    class Reused(LateEnv):
        def reset(self, *, seed=None, options=None):
            script = scripts[options["task_id"]]
            self.answers, self.start = list(script.answers), script.start
            return super().reset(seed=seed, options=options)

    late, engine, finished = random.Random(seed), AnyOrder(seed), []
    worlds = [Reused(draw=late) for _ in range(seats)]
    assert play_episodes(worlds, tasks, engine, context, rules, on_finished=finished.append) == expected
    assert sum(finished) == count and engine.largest <= seats


def test_an_engine_is_not_asked_while_only_environments_work():
    """`AnyOrder.collect` refuses to be asked without a request; the only episode waits for its environment."""
    env = LateEnv(step(), WIN, draw=random.Random(5))
    (episode,) = play_episodes([env], [("a", 0)], AnyOrder(1), context_of(TOKENIZER), RolloutSettings(max_turns=9))
    assert len(episode.turns) == 2 and episode.stop in (StopReason.WON, StopReason.LOST)
