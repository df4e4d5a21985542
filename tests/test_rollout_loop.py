"""The rollout by scripted policies and environments: who is asked when, what is paid, why an episode stops."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rollout_parts import (
    LOSE,
    WIN,
    WORDS,
    ScriptedEnv,
    ScriptedPolicy,
    answer,
    byte_tokenizer,
    chat_ids,
    context_of,
    ids_of,
    info,
    step,
)

from epo_trl.rollout import RolloutSettings, play_episodes
from epo_trl.rollout.running_episode import RunningEpisode
from epo_trl.trainers.generation import TurnGenerator
from epo_trl.types import StopReason


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def play(tokenizer, envs, rounds=(), settings=None, *, mode="windowed", template=WORDS, policy=None, **kwargs):
    policy = policy or ScriptedPolicy(tokenizer, rounds)
    tasks = [(f"task/{i}", 10 + i) for i in range(len(envs))]
    settings = settings or RolloutSettings(max_turns=3)
    return play_episodes(envs, tasks, policy, context_of(tokenizer, mode, template), settings, **kwargs)


def stops(episodes):
    return [episode.stop for episode in episodes]


# --- Turns ---------------------------------------------------------------------------------------------------------


def test_one_generation_call_per_turn_for_all_episodes_that_still_run(tokenizer):
    policy = ScriptedPolicy(tokenizer)
    envs = [ScriptedEnv(WIN), ScriptedEnv(step(), step(), WIN), ScriptedEnv(step(), LOSE)]
    episodes = play(tokenizer, envs, policy=policy)
    assert [len(call) for call in policy.calls] == [3, 2, 1]
    assert [len(episode.turns) for episode in episodes] == [1, 3, 2]


def test_a_response_is_decoded_as_it_was_sampled():
    tokenizer = byte_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    said = answer("go", "I 'm here , now .")
    [episode] = play(tokenizer, [ScriptedEnv(WIN)], [[said]])
    assert episode.turns[0].response == said


def test_a_turn_holds_what_was_shown_sampled_done_and_paid(tokenizer):
    env = ScriptedEnv(step("a box"), WIN, start=("a hall", info("open it", "look", task="win")))
    [episode] = play(tokenizer, [env], [[answer("open it")], [answer("look")]])
    one, two = episode.turns
    shown = "task: win. see: a hall can: open it, look"
    assert list(one.prompt_ids) == chat_ids(tokenizer, shown)
    assert list(one.response_ids) == [*ids_of(tokenizer, answer("open it")), tokenizer.eos_token_id]
    assert (one.response, one.observation, one.action) == (answer("open it"), "a hall", "open it")
    assert (one.is_valid, one.error, one.reward, one.dropped_turns) == (True, "", 0.0, 0)
    assert (two.observation, two.action, two.reward) == ("a box", "look", 10.0)
    assert "(1 saw a hall did open it)" in tokenizer.decode(two.prompt_ids)
    assert (episode.task, episode.task_type, episode.final_observation) == ("find it", "find", "done")
    assert (episode.won, episode.total_reward, episode.is_usable) == (True, 10.0, True)


def test_logprobs_are_carried_with_the_ids_they_belong_to(tokenizer):
    envs = [ScriptedEnv(WIN), ScriptedEnv(WIN)]
    one, two = play(tokenizer, envs, policy=ScriptedPolicy(tokenizer, logprobs=True))
    length = len(ids_of(tokenizer, answer("go"))) + 1
    assert one.turns[0].logprobs == (-0.5,) * length
    assert two.turns[0].logprobs == (-1.5,) * length
    assert play(tokenizer, [ScriptedEnv(WIN)])[0].turns[0].logprobs is None, "a policy without them"


@pytest.mark.parametrize("invalid", ["pass", "skip"])
def test_a_turn_without_tokens_is_the_turn_of_a_policy_that_says_the_same(tokenizer, invalid):
    rules = RolloutSettings(max_turns=3, invalid_action=invalid, env_reward_weight=0.5)
    envs = [ScriptedEnv(step("a", reward=2.0), WIN) for _ in range(2)]
    [played] = play(tokenizer, envs[:1], [[answer("fly  off")], [answer("GO")], [answer("go")]], rules)
    episode = RunningEpisode("task/0", 10, envs[1], rules)
    episode.start()
    for said in ("fly  off", "GO", "go"):
        if episode.stop is None:
            assert episode.act(said, thought="hm") is episode.turns[-1]
    bare, other = (
        replace(each, turns=tuple(replace(turn, response="") for turn in each.turns))
        for each in (episode.to_episode().without_tokens(), played.without_tokens())
    )
    assert bare == other and envs[0].received == envs[1].received and bare.invalid_actions == 1


# --- Rewards and invalid actions -----------------------------------------------------------------------------------


def test_an_invalid_action_is_passed_to_the_environment_and_penalised(tokenizer):
    env = ScriptedEnv(step("Nothing happens."), WIN)
    settings = RolloutSettings(invalid_action_penalty=0.25)
    [episode] = play(tokenizer, [env], [[answer("fly")], [answer("go")]], settings)
    assert env.received == ["fly", "go"]
    assert [(turn.is_valid, turn.reward) for turn in episode.turns] == [(False, -0.25), (True, 10.0)]
    assert episode.turns[0].error == "not an admissible action"
    assert (episode.turns[1].observation, episode.invalid_actions) == ("Nothing happens.", 1)


def unlisted(accepted):
    return {**info(), "admissible_actions": None, "accepted": accepted}


def test_an_environment_that_lists_no_actions_judges_them_itself(tokenizer):
    answers = [(*step(text)[:4], unlisted(accepted)) for text, accepted in (("What?", False), ("a", True))]
    env = ScriptedEnv(*answers, start=("b", unlisted(True)))
    settings = RolloutSettings(invalid_action="skip", invalid_action_penalty=0.25, max_turns=3)
    [episode] = play(tokenizer, [env], [[answer("fly")], [answer("Go  on")], ["nonsense"]], settings)
    assert env.received == ["fly", "Go on"]
    assert [(turn.is_valid, turn.reward) for turn in episode.turns] == [(False, -0.25), (True, 0.0), (False, -0.25)]
    assert episode.turns[0].error == "the environment does not know this action"


def test_all_actions_of_a_turn_are_sent_before_the_first_answer_is_awaited(tokenizer):
    calls = []

    class Slow(ScriptedEnv):
        def step_async(self, action):
            calls.append("ask")
            super().step_async(action)

        def step(self, action):
            calls.append("answer")
            return super().step(action)

    play(tokenizer, [Slow(WIN), Slow(WIN)], [[answer("go"), answer("go")]], RolloutSettings())
    assert calls == ["ask", "ask", "answer", "answer"]


def test_an_invalid_action_is_skipped_and_the_observation_repeated(tokenizer):
    env = ScriptedEnv(WIN)
    settings = RolloutSettings(invalid_action="skip", invalid_action_penalty=0.25)
    [episode] = play(tokenizer, [env], [["nonsense"], [answer("go")]], settings)
    assert env.received == ["go"]
    assert [turn.observation for turn in episode.turns] == ["start", "start"]
    assert [(turn.action, turn.reward) for turn in episode.turns] == [("nonsense", -0.25), ("go", 10.0)]


def test_a_turn_keeps_what_the_environment_paid_apart_from_what_the_rules_make_of_it(tokenizer):
    env = ScriptedEnv(step(reward=2), step(reward=-3.0), WIN)
    rounds = [[answer("go")], [answer("fly")], ["nonsense"]]
    passed = RolloutSettings(max_turns=3, invalid_action_penalty=0.25)
    [episode] = play(tokenizer, [env], rounds, passed)
    assert [(turn.env_reward, turn.reward) for turn in episode.turns] == [(2.0, 0.0), (-3.0, -0.25), (1.0, 9.75)]
    [skipped] = play(tokenizer, [ScriptedEnv(step(reward=2))], [["nonsense"]], replace(passed, invalid_action="skip"))
    assert [(turn.env_reward, turn.reward) for turn in skipped.turns] == [(0.0, -0.25), (2.0, 0.0), (0.0, 0.0)]


# --- Stop reasons --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "stop", "won", "turns"),
    [
        ([step(), WIN], StopReason.WON, True, 2),
        ([step(), step(), WIN], StopReason.WON, True, 3),  # on the last turn
        ([step(), LOSE], StopReason.LOST, False, 2),
        ([step(truncated=True)], StopReason.TRUNCATED, False, 1),
        ([], StopReason.TURN_LIMIT, False, 3),
        ([step(won=True)], StopReason.TURN_LIMIT, False, 3),  # a goal that was met on the way does not end it
        ([step("far " * 2000)], StopReason.CONTEXT_FULL, False, 1),
        ([step(), ValueError("broken")], StopReason.ABORTED, False, 1),
    ],
)
def test_each_stop_reason_is_reached(tokenizer, answers, stop, won, turns):
    [episode] = play(tokenizer, [ScriptedEnv(*answers)])
    assert (episode.stop, episode.won, len(episode.turns)) == (stop, won, turns)
    assert episode.is_usable == (stop is not StopReason.ABORTED)


@pytest.mark.parametrize(
    ("last", "score", "strict", "released"),
    [
        (step(truncated=True), 7, (StopReason.TRUNCATED, 0.0), (StopReason.WON, 10.0)),  # the engine's move limit
        (step(truncated=True), 0, (StopReason.TRUNCATED, 0.0), (StopReason.TRUNCATED, 0.0)),
        (step(), 7, (StopReason.TURN_LIMIT, 0.0), (StopReason.TURN_LIMIT, 0.0)),  # our limit ends nothing in the engine
        (LOSE, -100, (StopReason.LOST, 0.0), (StopReason.LOST, 0.0)),
        (WIN, 100, (StopReason.WON, 10.0), (StopReason.WON, 10.0)),
    ],
)
def test_the_success_rule_decides_what_is_solved(tokenizer, last, score, strict, released):
    last = (*last[:4], {**last[4], "score": score})
    for rule, expected in (("won", strict), ("ended-with-score", released)):
        settings = RolloutSettings(max_turns=1, success_rule=rule)
        [episode] = play(tokenizer, [ScriptedEnv(last)], settings=settings)
        assert (episode.stop, episode.total_reward) == expected
        assert episode.won == (episode.stop is StopReason.WON)
        assert episode.score == score


def test_the_environment_gets_the_task_its_seed_and_the_options(tokenizer):
    env = ScriptedEnv(WIN)
    [episode] = play(tokenizer, [env], settings=RolloutSettings(env_options={"engine_limit": 100}))
    [(seed, options)] = env.resets
    assert (seed, options) == (10, {"engine_limit": 100, "task_id": "task/0"})
    assert episode.score is None


def test_a_response_without_a_token_aborts_its_episode(tokenizer):
    """vLLM returns one for a request that it has dropped."""
    episodes = play(tokenizer, [ScriptedEnv(WIN), ScriptedEnv(WIN)], [[[], answer("go")]])
    assert stops(episodes) == [StopReason.ABORTED, StopReason.WON]
    assert "without a token" in episodes[0].error and episodes[0].turns == ()


def test_a_first_prompt_that_does_not_fit_gives_an_episode_without_turns(tokenizer):
    policy = ScriptedPolicy(tokenizer)
    far = ScriptedEnv(start=("far " * 2000, info()))
    episodes = play(tokenizer, [far, ScriptedEnv(WIN)], policy=policy)
    assert stops(episodes) == [StopReason.CONTEXT_FULL, StopReason.WON]
    assert (episodes[0].turns, episodes[0].is_usable) == ((), False)
    assert [len(call) for call in policy.calls] == [1]


# --- Failing environments ------------------------------------------------------------------------------------------


class Unreachable(ScriptedEnv):
    def step_async(self, action):
        raise OSError("pipe")


WITHOUT_TASK = {name: value for name, value in info().items() if name != "task"}


@pytest.mark.parametrize(
    ("make", "error", "turns", "asked"),
    [
        (lambda: ScriptedEnv(start=OSError("no such game")), "OSError: no such game", 0, [2, 2]),
        (lambda: ScriptedEnv(step(), KeyError("fact")), "KeyError: 'fact'", 1, [3, 3]),  # that turn has no outcome
        (lambda: Unreachable(WIN), "OSError: pipe", 0, [3, 2]),
        (lambda: ScriptedEnv(("odd", 0.0, False, False, {})), "won", 0, [3, 2]),
        (lambda: ScriptedEnv((*step()[:4], WITHOUT_TASK)), "KeyError: 'task'", 1, [3, 2]),  # no prompt can be built
    ],
    ids=["reset", "step", "sending", "the contract", "the template"],
)
def test_an_environment_that_fails_aborts_its_episode_alone(tokenizer, make, error, turns, asked):
    policy = ScriptedPolicy(tokenizer)
    episodes = play(tokenizer, [ScriptedEnv(step(), WIN), make(), ScriptedEnv(step(), WIN)], policy=policy)
    assert stops(episodes) == [StopReason.WON, StopReason.ABORTED, StopReason.WON]
    assert error in episodes[1].error
    assert (len(episodes[1].turns), episodes[1].task_id) == (turns, "task/1")
    assert [len(call) for call in policy.calls] == asked


@pytest.mark.parametrize(("reward", "weight", "paid"), [(-1e20, 1.0, "-1e+20"), (2e6, 1e6, "2000000000000.0")])
def test_a_reward_that_no_loss_can_be_made_of_aborts_that_episode_alone(tokenizer, reward, weight, paid):
    envs = [ScriptedEnv(step(reward=reward)), ScriptedEnv(WIN)]
    episodes = play(tokenizer, envs, settings=RolloutSettings(max_turns=5, env_reward_weight=weight))
    assert stops(episodes) == [StopReason.ABORTED, StopReason.WON]
    assert episodes[0].error == (
        "EnvError: reward: expected a number from -1e+12 to 1e+12, beyond which a loss may overflow, got "
        f"{paid} (the environment gave {reward}); lower env_reward_weight"
    )


# --- Several processes ---------------------------------------------------------------------------------------------


class OfSeveralRanks(TurnGenerator):
    """A generator whose other ranks have the episodes that `needed` says."""

    def __init__(self, tokenizer, policy, needed):
        super().__init__(SimpleNamespace(processing_class=tokenizer, args=SimpleNamespace(request_seeds=False)))
        self._generate, self.prompts_needed = policy, needed


def test_dummy_prompts_fill_up_what_is_needed_and_their_responses_are_thrown_away(tokenizer):
    policy = ScriptedPolicy(tokenizer, logprobs=True)
    asked = []

    def needed(running):
        asked.append(running)
        return 3 if len(asked) <= 4 else 0

    envs = [ScriptedEnv(step(), WIN), ScriptedEnv(WIN)]
    episodes = play(tokenizer, envs, policy=OfSeveralRanks(tokenizer, policy, needed))
    assert asked == [2, 1, 0, 0, 0]  # goes on for the other processes after its own last episode
    assert [len(call) for call in policy.calls] == [3, 3, 3, 3]
    dummy = [tokenizer.eos_token_id]
    assert [call.count(dummy) for call in policy.calls] == [1, 2, 3, 3]
    assert [len(episode.turns) for episode in episodes] == [2, 1]
    assert stops(episodes) == [StopReason.WON, StopReason.WON]
