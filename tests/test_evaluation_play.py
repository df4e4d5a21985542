"""How a protocol is played: whole lists, in order, by the protocol's rules."""

import pytest
from rollout_parts import LOSE, WIN, ScriptedEnv, ScriptedPolicy, byte_tokenizer, step

from epo_trl.envs.base import TaskSuite
from epo_trl.envs.toy import ToySuite
from epo_trl.evaluation import Protocol, get_protocol
from epo_trl.evaluation.play import (
    check_first_task,
    play_chunks,
    protocol_context,
    protocol_settings,
    sampled_tasks,
    split_chunks,
)
from epo_trl.rollout import Engine, PromptTemplate, Response
from epo_trl.rollout.demonstrations import expert_episodes
from epo_trl.rollout.spec import ResponseArguments
from epo_trl.types import StopReason


class ListSuite(TaskSuite):
    """Task "n" is the n-th game of a list. Remembers its environments."""

    name = "list"

    def __init__(self, *games):
        self.games = games
        self.envs = []

    def task_ids(self, split):
        return [str(i) for i in range(len(self.games))]

    def make_env(self):
        suite = self

        class Env(ScriptedEnv):
            closed = 0

            def reset(self, *, seed=None, options=None):
                self.answers = list(suite.games[int(options["task_id"])])
                return super().reset(seed=seed, options=options)

            def close(self):
                self.closed += 1

        self.envs.append(Env())
        return self.envs[-1]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def protocol(**kwargs):
    return Protocol(**{"name": "p", "max_turns": 3, "history_length": 2, "temperature": 0.0} | kwargs)


def context_for(rules, tokenizer, max_context_tokens=None, **options):
    options = ResponseArguments(**{"max_completion_length": 64} | options)
    return protocol_context(rules, options, ListSuite(), tokenizer, max_context_tokens=max_context_tokens)


def play_list(suite, ids, policy, context, rules, *, parallel=64, require_think=True, **kwargs):
    """Returns the episodes of a list in order, and the seconds."""
    settings = protocol_settings(rules, require_think=require_think)
    chunks = list(play_chunks(suite, split_chunks(ids, parallel), lambda _: policy, context, settings, **kwargs))
    return [episode for episodes, _ in chunks for episode in episodes], sum(seconds for _, seconds in chunks)


def play(suite, tokenizer, rules=None, policy=None, **kwargs):
    rules = rules or protocol()
    policy = policy or ScriptedPolicy(tokenizer)
    return play_list(suite, suite.task_ids("iid"), policy, context_for(rules, tokenizer), rules, **kwargs)


class LastFirst(Engine):
    """Answers the request with the largest number first, one at a time. Without a barrier, a slow episode delays none.

    `asked` are the numbers of the requests, in order, and `largest` is the largest number of them at once.
    """

    def __init__(self, tokenizer):
        self.answer, self.asked, self.largest, self._pending = ScriptedPolicy(tokenizer), [], 0, {}

    def submit(self, number, prompt_ids):
        self.asked.append(number)
        self._pending[number] = prompt_ids
        self.largest = max(self.largest, len(self._pending))

    def collect(self, seconds):
        number = max(self._pending)
        return [Response(number, self.answer([self._pending.pop(number)])[0][0])]


@pytest.mark.parametrize("parallel", [1, 2, 5, 64])
def test_an_engine_without_a_barrier_plays_all_parts_at_once_and_gives_them_in_order(tokenizer, parallel):
    games = [[step(), step(), WIN], [LOSE], [step(), WIN], [], [WIN]]
    expected, _ = play(ListSuite(*games), tokenizer, parallel=parallel)
    suite, engine, finished = ListSuite(*games), LastFirst(tokenizer), []
    episodes, seconds = play(suite, tokenizer, policy=engine, parallel=parallel, on_finished=finished.append)
    assert episodes == expected and sum(finished) == 5 and seconds > 0
    assert len(suite.envs) == min(parallel, 5) == engine.largest and all(env.closed == 1 for env in suite.envs)
    if parallel == 2:  # in parts of two, the third task would wait until the first has ended
        assert engine.asked.index(2) < [i for i, number in enumerate(engine.asked) if number == 0][-1]


@pytest.mark.parametrize("parallel", [1, 2, 5, 64])
def test_the_whole_list_is_played_in_order_however_many_at_a_time(tokenizer, parallel):
    suite = ListSuite([WIN], [LOSE], [step(), WIN], [], [WIN])
    episodes, seconds = play(suite, tokenizer, parallel=parallel)
    assert [episode.task_id for episode in episodes] == ["0", "1", "2", "3", "4"]
    won, lost, limit = StopReason.WON, StopReason.LOST, StopReason.TURN_LIMIT
    assert [episode.stop for episode in episodes] == [won, lost, won, limit, won]
    assert seconds > 0
    assert len(suite.envs) == min(parallel, 5)


def test_every_episode_gets_the_seed(tokenizer):
    suite = ListSuite([WIN], [WIN])
    episodes, _ = play(suite, tokenizer, seed=7)
    assert [env.resets for env in suite.envs] == [[(7, {"task_id": "0"})], [(7, {"task_id": "1"})]]
    assert [episode.seed for episode in episodes] == [7, 7]


def broken(prompt_ids):
    raise RuntimeError("out of memory")


def test_environments_are_closed_once_also_when_the_policy_fails(tokenizer):
    suite = ListSuite([WIN], [WIN], [WIN])
    play(suite, tokenizer, parallel=2)
    assert [env.closed for env in suite.envs] == [1, 1]
    suite = ListSuite([WIN], [WIN])
    with pytest.raises(RuntimeError, match="out of memory"):
        play(suite, tokenizer, policy=broken)
    assert [env.closed for env in suite.envs] == [1, 1]


def test_what_the_environment_lacks_is_said_before_anything_is_played(tokenizer):
    rules = protocol()
    context = context_for(rules, tokenizer, prompt_template="scienceworld")
    with pytest.raises(ValueError, match="^prompt_template"):
        check_first_task(ListSuite([WIN]).make_env(), "0", 0, context, rules)


@pytest.mark.parametrize("mode", ["windowed", "concatenated"])
def test_a_first_prompt_that_does_not_fit_is_refused_and_one_that_just_fits_is_taken(tokenizer, mode):
    rules = protocol(context=mode)

    def check(**sizes):
        check_first_task(ListSuite([WIN]).make_env(), "0", 0, context_for(rules, tokenizer, **sizes), rules)

    with pytest.raises(ValueError, match="max_prompt_length: expected at least the [0-9]+.*got 1") as caught:
        check(max_prompt_length=1)
    needed = int(str(caught.value).split("at least the ")[1].split(" ")[0])
    check(max_prompt_length=needed)
    with pytest.raises(ValueError, match=f"max_prompt_length: .*at least the {needed} .*task '0'.* got {needed - 1}"):
        check(max_prompt_length=needed - 1)
    if mode == "concatenated":  # the whole sequence has a limit of its own
        with pytest.raises(ValueError, match=f" {needed} tokens .*a response of 64 has to fit the .* {needed + 63} "):
            check(max_prompt_length=needed, max_context_tokens=needed + 63)


def test_the_protocol_decides_the_context(tokenizer):
    rules = protocol(context="concatenated", history_length=4)
    context = context_for(rules, tokenizer, max_prompt_length=11, max_completion_length=22, max_context_tokens=33)
    assert (context.mode, context.history_length) == ("concatenated", 4)
    assert (context.max_prompt_tokens, context.max_response_tokens, context.max_context_tokens) == (11, 22, 33)
    assert context.template.name == "general"
    assert dict(context.chat_template_kwargs) == {}
    windowed = context_for(protocol(), tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert (windowed.mode, windowed.history_length) == ("windowed", 2)
    assert windowed.chat_template_kwargs == {"enable_thinking": False}


def test_a_protocol_that_prescribes_a_prompt_template_refuses_another(tokenizer):
    protocol = get_protocol("alfworld-plain50")
    with pytest.raises(ValueError, match="prompt_template: expected 'plain', .*alfworld-plain50.*, got 'general'"):
        context_for(protocol, tokenizer, prompt_template="general")
    context = context_for(protocol, tokenizer, prompt_template="plain")
    assert context.template == PromptTemplate.load("plain") and not context.is_windowed


def test_an_expert_wins_all_test_tasks_of_the_toy_suite_through_the_rollout(tokenizer):
    suite, rules = ToySuite(), protocol(max_turns=7)
    ids = suite.task_ids("ood")
    context = context_for(rules, tokenizer)
    turns = list(expert_episodes(suite, [(task_id, 0) for task_id in ids], context, max_turns=7))
    answers = {tuple(turn.prompt_ids): turn.response_ids for episode in turns for turn in episode}
    policy = lambda prompt_ids: ([answers[tuple(ids)] for ids in prompt_ids], None)  # noqa: E731
    episodes, _ = play_list(suite, ids, policy, context, rules, parallel=16)
    assert len(episodes) == 40
    assert all(episode.won for episode in episodes)


def test_a_sample_of_a_sorted_list_has_all_its_kinds_and_is_part_of_a_larger_one():
    suite = ListSuite(*[()] * 140)  # as in the real ALFWorld: ids 0 to 34 are of one kind, and so on
    small, large = (sampled_tasks(suite, "ood", count) for count in (20, 64))
    assert len(small) == 20 and set(small) < set(large) and small == sampled_tasks(ListSuite(*[()] * 140), "ood", 20)
    assert {int(task) // 35 for task in small} == {0, 1, 2, 3} and small == sorted(small, key=int)
    assert sampled_tasks(suite, "ood", None) == sampled_tasks(suite, "ood", 500) == suite.task_ids("ood")
