"""The audit of credits: its estimates against the exact advantages of the corridor, its statistics, its command."""

import copy
import json
import random
import shutil
from functools import cache
from statistics import fmean

import numpy as np
import pytest
import torch
from corridor import DOORS, CorridorSuite, door_on
from trainer_kit import make_episode, make_episodes, make_model, make_ppo

from epo_trl.cli import main
from epo_trl.envs.trap import HATCH, Trap, TrapSuite, go_through
from epo_trl.errors import InputError
from epo_trl.lab.credit_audit import AuditPlan, Player, compare, list_estimators, play_round
from epo_trl.lab.credit_audit.critics import SavedCritic
from epo_trl.lab.credit_audit.estimators import build_batch, turn_credits
from epo_trl.lab.credit_audit.rounds import record, true_advantages
from epo_trl.lab.credit_audit.statistics import Interval
from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.models.critic import Critic, critic_prefix, save_critic
from epo_trl.rollout import ContextBuilder, PromptTemplate, RolloutSettings
from epo_trl.rollout.demonstrations import ACTION
from epo_trl.rollout.templates import TEMPLATES
from epo_trl.types import Episode, StopReason

ROOMS, TURNS, REWARD = 4, 8, 10.0
NO_TURNS = Episode("a", "", "", (), StopReason.CONTEXT_FULL)  # its first prompt does not fit
SUITE = CorridorSuite(ROOMS)
CONTEXT = ContextBuilder(build_tokenizer(corpus(SUITE, "corridor")), PromptTemplate.load("corridor"), history_length=0)
SETTINGS = RolloutSettings(max_turns=TURNS, success_reward=REWARD, require_think=False)
TASKS = [f"train/{number}" for number in range(8 * ROOMS)]


@cache
def room_in(prompt_ids):
    return int(CONTEXT.tokenizer.decode(prompt_ids).rpartition("room ")[2].split()[0])


class Doors:
    """A policy that takes the right door of each room with a probability of its own."""

    def __init__(self, seed, right=(0.5, 0.7, 0.6, 0.8)):
        self.random, self.right = random.Random(seed), right
        answers = CONTEXT.encode(ACTION, [{"action": door} for door in DOORS])
        self.answers = {door: [*ids, CONTEXT.tokenizer.eos_token_id] for door, ids in zip(DOORS, answers, strict=True)}
        self.value = cache(self.value)

    def __call__(self, prompt_ids):
        return [self.answers[self.door(room_in(tuple(ids)))] for ids in prompt_ids], None

    def door(self, room):
        right, wrong = door_on(room), DOORS[1 - DOORS.index(door_on(room))]
        return right if self.random.random() < self.right[room - 1] else wrong

    def value(self, room, left):
        """Returns the exact value of a room with some turns left."""
        if left == 0:
            return 0.0
        on = REWARD if room == ROOMS else self.value(room + 1, left - 1)
        return self.right[room - 1] * on + (1 - self.right[room - 1]) * self.value(1, left - 1)

    def advantage(self, episode, k):
        """Returns the exact advantage of a recorded turn."""
        room, left = int(episode.turns[k].observation.rstrip(".").split()[-1]), TURNS - k
        if episode.turns[k].action != door_on(room):
            after = self.value(1, left - 1)
        else:
            after = REWARD if room == ROOMS else self.value(room + 1, left - 1)
        return after - self.value(room, left)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_estimates_are_the_exact_advantages_up_to_their_noise(deterministic, monkeypatch):
    """By the recorded next state, or by stepping again: both must be right where the corridor is deterministic."""
    monkeypatch.setattr("corridor.Corridor.is_deterministic", deterministic)
    policy, plan = Doors(0), AuditPlan(group_size=2, audited=2, continuations=200, parallel=512)
    player = Player(SUITE, policy, CONTEXT, SETTINGS)
    episodes, points = record(player, TASKS[:6], plan.parallel, random.Random(0))
    turns = [(i, k) for i, episode in enumerate(episodes) for k in range(len(episode.turns))]
    halves, _ = true_advantages(player, episodes, points, turns, plan)
    exact = [policy.advantage(episodes[i], k) for i, k in turns]
    assert len(turns) > 20 and max(map(abs, exact)) > 2
    assert all(tuple(pair) != (0.0, 0.0) for pair, value in zip(halves, exact, strict=True) if abs(value) > 1)
    # The deviation of a return is at most REWARD / 2, so that of a half at most 5 / 10, and of a difference 0.71.
    errors = np.array(halves) - np.array(exact)[:, None]
    assert np.abs(errors).max() < 4 * 0.71
    assert abs(errors.mean()) < 0.15
    assert abs(np.corrcoef(errors[:, 0], errors[:, 1])[0, 1]) < 0.4  # of about 40 turns


def audited(seed, tasks=16):
    """Returns the comparison of an audit, and the exact advantages of its turns and their credits."""
    policy, plan, draw = Doors(seed), AuditPlan(group_size=8, continuations=8, parallel=512), random.Random(seed)
    player = Player(SUITE, policy, CONTEXT, SETTINGS)
    episodes, points = record(player, [task for task in draw.sample(TASKS, tasks) for _ in range(8)], 512, draw)
    turns = [(i, k) for i in range(0, len(episodes), 4) for k in range(len(episodes[i].turns))]
    credits = turn_credits(list_estimators(state_keys=False, gae=None)[0], build_batch(episodes, 8, "group"), turns)
    halves, _ = true_advantages(player, episodes, points, turns, plan)
    found = compare(credits, halves, [episodes[i].task_id for i, _ in turns])
    return found, credits, halves, [policy.advantage(episodes[i], k) for i, k in turns]


@pytest.mark.parametrize(("scale", "deviations"), [("none", (1, 1)), ("group", (2, 32)), ("batch", (83 / 3, 83 / 3))])
def test_advantages_in_a_group_by_hand(scale, deviations):
    """Returns are 1, 3 and 5, 13: group means 2 and 9, variances 2 and 32, over all four 83/3.

    A group of equal rewards has none, although the float32 mean of eight times -0.3 is another number.
    """
    episodes = [make_episode([(3, 2), (3, 1)], reward, random.Random(0)) for reward in (1.0, 3.0, 5.0, 13.0)]
    expected = [each / deviations[abs(each) > 1] ** 0.5 for each in (-1, 1, -4, 4)]
    assert build_batch(episodes, 2, scale).group_advantages.tolist() == pytest.approx(expected, rel=1e-3)
    episodes = [make_episode([(2, 1)], -0.3, random.Random(0)) for _ in range(8)]
    assert not build_batch(episodes, 8, scale).group_advantages.any()


@pytest.mark.slow
def test_the_audit_agrees_with_the_exact_advantages_on_ten_seeds():
    """Each credit's exact correlation lies in the audit's interval, and the correction for noise brings it nearer."""
    inside, corrected, naive = [], [], []
    for seed in range(10):
        comparison, credits, halves, exact = audited(seed)
        assert comparison.turns == len(exact) and comparison.tasks == 16
        for name in ("grpo", "gigpo", "gagpo", "graph-gpo", "rloo"):
            wanted, found = np.corrcoef(credits[name], exact)[0, 1], comparison.agreements[name].correlation
            inside.append(found.low <= wanted <= found.high)
            corrected.append(found.value - wanted)
            naive.append(np.corrcoef(credits[name], np.mean(halves, axis=1))[0, 1] - wanted)
    assert fmean(inside) >= 0.9
    assert abs(fmean(corrected)) < 0.05
    assert fmean(naive) < -0.02 and abs(fmean(corrected)) < abs(fmean(naive))


def test_the_correlation_is_corrected_for_noise_and_its_interval_covers_the_truth():
    """300 tasks of 10 turns; the credit has correlation 0.6 with the truth, whose estimates are mostly noise."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=3000)
    credit = 0.6 * truth + 0.8 * rng.normal(size=3000)
    halves = truth[:, None] + 2.0 * rng.normal(size=(3000, 2))
    tasks = [f"train/{number // 10}" for number in range(3000)]
    credits = {"grpo": credit, "better": truth, "none": np.zeros(3000)}
    found = compare(credits, halves, tasks)
    assert found.deviation == pytest.approx(1.0, abs=0.15)
    assert found.standard_error == pytest.approx(2 / np.sqrt(2), abs=0.05)
    one = found.agreements["grpo"]
    assert one.correlation.value == pytest.approx(0.6, abs=0.06)
    assert one.correlation.low < 0.6 < one.correlation.high < one.correlation.low + 0.25
    assert np.corrcoef(credit, halves.mean(1))[0, 1] < 0.4
    assert (one.gain.low, one.gain.value, one.gain.high, one.silent) == (0, 0, 0, 0)
    assert found.agreements["better"].gain.low > 0.2
    silent = found.agreements["none"]
    assert np.isnan(silent.correlation.value) and silent.silent == 1 and silent.sign.value == 0.5


def test_an_interval_is_students_t_and_covers_the_truth_with_few_tasks():
    """A credit whose sign is right with probability 0.7, in 8 tasks of 40 turns: the textbook's interval of a mean."""
    rng, inside = np.random.default_rng(0), []
    for seed in range(200):
        signs = np.where(rng.random((8, 40)) < 0.7, 1.0, -1.0)
        tasks = [f"train/{row}" for row in range(8) for _ in range(40)]
        credit = signs.flatten()
        found = compare({"grpo": credit}, [(2.0, 2.0 + 1e-3 * (i % 2)) for i in range(320)], tasks, seed=seed)
        shares, one = (signs > 0).mean(1), found.agreements["grpo"].sign
        half = 2.3646 * shares.std(ddof=1) / 8**0.5  # Student's t with 7 degrees of freedom
        assert one.value == pytest.approx(shares.mean())
        assert one.high - one.value == pytest.approx(one.value - one.low) == pytest.approx(half, rel=0.1)
        inside.append(one.low <= 0.7 <= one.high)
    assert 0.9 <= fmean(inside) <= 0.99
    assert str(Interval(-0.254, -0.354, -0.154)) == "-.25 ± .10"
    assert np.isnan(compare({"grpo": credit[:120]}, [(2.0, 2.001)] * 120, tasks[:120]).agreements["grpo"].sign.low)


def test_the_sign_counts_turns_with_a_clear_advantage_only():
    """Halves differ by 0 or 0.2, so the standard error is below 0.1; three of four turns are clear, two right."""
    halves = [(2.0, 2.2), (-2.0, -2.0), (1.0, 1.2), (0.01, -0.01)]
    found = compare({"grpo": [1.0, -1.0, -1.0, 5.0]}, halves, ["a", "b", "c", "d"])
    assert found.clear_turns == 3
    assert found.agreements["grpo"].sign.value == pytest.approx(2 / 3)
    # Without noise an advantage of 0 is not clear: two of three turns have one, and the credit has the sign of one.
    found = compare({"grpo": [1.0, -1.0, 1.0]}, [(0.0, 0.0), (-2.0, -2.0), (-1.0, -1.0)], ["a", "b", "c"])
    assert (found.clear_turns, found.agreements["grpo"].sign.value) == (2, 0.5)


# ---------------------------------------------------------------------------------------------------------- rounds


def round_of(suite, number):
    """Plays a round of six tasks with a policy that always takes the hatch."""
    context = ContextBuilder(
        build_tokenizer(corpus(TrapSuite(), "corridor")), PromptTemplate.load("corridor"), history_length=0
    )
    [answer] = context.encode(ACTION, [{"action": go_through(HATCH)}])
    player = Player(suite, lambda prompts: ([list(answer) for _ in prompts], None), context, SETTINGS)
    estimators, tasks = {"grpo": list_estimators(state_keys=False, gae=None)[0]["grpo"]}, suite.task_ids("train")
    draw, plan = random.Random(f"round {number}"), AuditPlan(group_size=8, continuations=4)
    return play_round(player, tasks[6 * number : 6 * number + 6], plan, estimators, draw)


def test_rounds_have_luck_of_their_own_which_is_the_same_after_an_interruption():
    """48 episodes with a chance of .35 agree by chance with a probability below 1e-12."""
    suite = TrapSuite()
    first, second = (round_of(suite, number) for number in range(2))
    assert first["success"] != second["success"] and second == round_of(TrapSuite(), 1)


# --------------------------------------------------------------------------------------------------------- critics


@pytest.mark.slow
@pytest.mark.parametrize("context", ["windowed", "concatenated"])
@pytest.mark.parametrize("critic", ["separate", "value_head"])
def test_the_values_of_a_saved_critic_are_those_before_each_token(tmp_path, critic, context):
    policy = make_model()
    trainer = make_ppo(tmp_path / "run", context=context, critic=critic)
    save_critic(str(tmp_path), trainer.critic, trainer.model.state_dict(), critic_prefix(trainer.model, trainer.critic))
    episodes = [episode for episode in make_episodes() if episode.is_usable]
    critic = SavedCritic(str(tmp_path), policy, trainer.args, trainer.rules.context)
    found = critic([*episodes, NO_TURNS])
    assert found.values.std() > 0.5 and not found.final_values.any()
    for row, episode in zip(found.values, [*episodes, NO_TURNS], strict=True):
        expected, sequence = [], []
        for turn in episode.turns:
            sequence = [*(sequence if context == "concatenated" else []), *turn.prompt_ids]
            for token in turn.response_ids:
                with torch.no_grad():
                    expected.append(
                        float(trainer.model(input_ids=torch.tensor([sequence]), values_only=True).state_values[0, -1])
                    )
                sequence = [*sequence, token]
        torch.testing.assert_close(row[: len(expected)], torch.tensor(expected), rtol=1e-4, atol=1e-4)
        assert not row[len(expected) :].any()


# --------------------------------------------------------------------------------------------------------- command


SMALL = {"tasks": 2, "round": 2, "group": 2, "episodes": 1, "continuations": 2}
PPO = ("--algorithm", "ppo", "--num_generations", "1")


class Run:
    """A folder with a tiny policy for the trap, and the config that it belongs to."""

    def __init__(self, path):
        suite, self.folder, self.config = TrapSuite(), path / "run", path / "trap.yaml"
        self.tokenizer = build_tokenizer(corpus(suite, "corridor"))
        self.model = build_model(self.tokenizer, hidden_size=32, heads=2)
        self.save(self.folder)
        settings = "environment: trap\nprompt_template: corridor\nrequire_think: false\nmax_turns: 3\nuse_cpu: true\n"
        settings += "max_prompt_length: 64\nmax_completion_length: 4\nhistory_length: 0\noutput_dir: x\n"
        self.config.write_text(settings, encoding="utf-8")

    def save(self, folder):
        for part in (self.model, self.tokenizer):
            part.save_pretrained(folder)

    def save_critic(self, **parts):
        critic = Critic(self.model.config.hidden_size, copy.deepcopy(self.model.base_model), **parts)
        for head in filter(None, (critic.head, critic.token_head)):
            torch.nn.init.normal_(head.weight)
        save_critic(str(self.folder), critic, critic.state_dict(), "")

    def audit(self, *words, policy=None, **plan):
        """Runs the command with a small plan."""
        words = [*words, *(word for name, x in {**SMALL, **plan}.items() for word in (f"--audit_{name}", str(x)))]
        assert main(["audit-credit", str(policy or self.folder), "--config", str(self.config), *words]) == 0

    def refused(self, capsys, *words, **plan):
        """Returns the error of a command that fails."""
        with pytest.raises(AssertionError):
            self.audit(*words, **plan)
        return capsys.readouterr().err

    def read(self, name, folder=None):
        return json.loads(((folder or self.folder) / "credit_audit" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_the_command_writes_its_results_and_continues_where_it_stopped(run, capsys, monkeypatch, tmp_path):
    files = run.folder / "credit_audit"
    template = shutil.copytree(TEMPLATES / "corridor", tmp_path / "own")
    run.config.write_text(run.config.read_text().replace(": corridor", f": {template}"))
    run.audit(tasks=4, minutes=0.0001)
    assert (files / "round-000.json").is_file() and not (files / "round-001.json").is_file()
    first = (files / "round-000.json").read_bytes()
    run.audit(tasks=4)
    assert (files / "round-000.json").read_bytes() == first
    report = run.read("report")
    assert report["tasks"] == 4 and report["episodes"] == 8 and report["turns"] == 12
    assert {"grpo", "gigpo", "hgpo", "rloo"} <= report["agreements"].keys()
    assert "archer" in report["left_out"]
    assert "| grpo " in (files / "report.md").read_text(encoding="utf-8")
    monkeypatch.setattr("epo_trl.lab.credit_audit.program.play_round", None)  # nothing is left to play
    run.audit(tasks=4)
    assert "(plan_continuations: 2 there, 4 now)" in run.refused(capsys, tasks=4, continuations=4)
    (template / "first.txt").write_text("{place} {task}")
    assert "expected a folder of this audit" in (error := run.refused(capsys, tasks=4)) and "(template.first" in error


def test_the_report_names_the_tasks_that_an_error_left_out(run, capsys, monkeypatch):
    def fail(game, *, seed=None, options=None):
        if options["task_id"] in failing:
            raise RuntimeError("engine crashed")
        return reset(game, seed=seed, options=options)

    run.audit(tasks=4)
    reset, failing = Trap.reset, {run.read("round-000")["tasks"][1]}
    monkeypatch.setattr("epo_trl.envs.trap.Trap.reset", fail)
    run.audit("--audit_folder", str(run.folder / "b" / "credit_audit"), tasks=4)
    report, error = run.read("report", run.folder / "b"), "RuntimeError: engine crashed"
    assert report["tasks"] == 3 and report["aborted"] == dict.fromkeys(failing, error)
    assert f"Left out: {min(failing)} ({error})." in capsys.readouterr().out


def test_the_credits_of_a_critic_are_audited_too(run, capsys):
    run.save_critic()
    run.audit(*PPO)
    found = run.read("round-000")["credits"]
    assert {"turn", "token", "outcome", "turn, lambda 0"} <= found.keys()
    assert np.std(found["turn, lambda 0"]) > 0 and found["turn, lambda 0"] != found["turn"]
    refused = run.refused(capsys, *PPO, "--gae_lambda", "0.5")
    assert "(gae_lambda: 1.0 there, 0.5 now)" in refused


def test_of_a_critic_with_two_heads_each_token_gets_the_value_of_its_head(run):
    """The first head alone decides `turn`, both decide `vetta`; credits of one head for all tokens are left out."""
    run.save_critic(token_head=True)
    run.audit(*PPO, "--credit", "vetta")
    report = run.read("report")
    assert {"vetta", "turn", "turn, lambda 0"} <= report["agreements"].keys()
    assert {"token", "outcome"} <= report["left_out"].keys()
    found = run.read("round-000")["credits"]
    assert np.std(found["vetta"]) > 0 and found["vetta"] != found["turn"]


def test_the_audit_samples_as_training_does(run, monkeypatch, capsys):
    def stop(player, *_):
        raise InputError(f"{[getattr(player.policy.config, name) for name in names]}")

    names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "typical_p"]
    monkeypatch.setattr("epo_trl.lab.credit_audit.program.play_round", stop)
    others = ["--top_p", "0.5", "--min_p", "0.1", "--repetition_penalty", "1.2", "--top_k", "3"]
    more = ["--generation_kwargs", '{"typical_p": 0.7}']
    for name, given, expected in (
        ("a", [], "[0.9, 1.0, 0, None, 1.0, None]"),
        ("b", [*others, *more], "[0.9, 0.5, 3, 0.1, 1.2, 0.7]"),
        ("a", ["--top_p", "0.5"], "(top_p: 1.0 there, 0.5 now)"),
    ):
        assert expected in run.refused(capsys, "--temperature", "0.9", *given, folder=run.folder / name)


def test_a_command_that_cannot_work_says_why(run, capsys):
    assert "continuations: expected an even number" in run.refused(capsys, continuations=3)
    assert "RUN: expected the output folder of a run" in run.refused(capsys, policy=run.folder / "nowhere")
    error = "config: expected no method with rewards of its own, got 'dapo'"
    assert error in run.refused(capsys, "--policy_method", "dapo")
