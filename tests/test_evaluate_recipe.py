"""`recipes/evaluate.py`: whose rules are played, what is kept of an interrupted evaluation, and what plays."""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from random_policy import TOKENIZER, TOY, RandomPolicy
from rollout_parts import QWEN, byte_tokenizer
from trl import ModelConfig
from typed import parse_recipe

from epo_trl.cli import evaluation
from epo_trl.cli.options import read_command_line
from epo_trl.envs import EnvError
from epo_trl.envs.registry import build_suite
from epo_trl.envs.tools.suite import ToolsArguments
from epo_trl.envs.toy import ToySuite, TreasureHunt
from epo_trl.envs.trap import TrapSuite
from epo_trl.errors import InputError
from epo_trl.evaluation import get_protocol
from epo_trl.models.vllm import VllmPolicy, load_vllm_policy
from epo_trl.rollout.context import TurnView
from epo_trl.runs.guards import TooManyAborted
from epo_trl.runs.run_lock import RunningError
from epo_trl.runs.run_settings import content_digest
from epo_trl.watch.source import find_samples


@pytest.fixture
def play(monkeypatch):
    """Returns a function that runs the recipe on eight tasks of each list, four at a time."""

    def run(output, *argv, on_call=lambda: None, model="tiny", make=RandomPolicy, limit=None):
        monkeypatch.setattr(evaluation, "load", lambda *_: (make(on_call), TOKENIZER, limit))
        given = ["--environment", TOY, "--model_name_or_path", str(model), *argv]
        given += [] if output is None else ["--output", str(output)]
        fixed = ["--eval_episodes", "8", "--parallel", "4", "--max_turns", "2"]
        evaluation.main(read_command_line([*fixed, *given]))
        return None if output is None else reports_of(output)

    return run


def reports_of(output):
    reports = json.loads(Path(output).read_text())["reports"]
    return [{key: value for key, value in report.items() if key != "seconds"} for report in reports]


# --------------------------------------------------------------------------------------------------------- protocols


def test_rules_of_one_s_own_are_reported_under_a_name_of_their_own(play, tmp_path, capsys):
    reports = play(tmp_path / "r.json", "--temperature", "0")
    assert [report["protocol"]["name"] for report in reports] == ["alfworld-tiny20+max_turns=2+temperature=0"] * 2
    assert {report["protocol"]["max_turns"] for report in reports} == {2}
    assert "alfworld-tiny20+max_turns=2+temperature=0" in capsys.readouterr().out


def test_the_plain_name_stands_for_the_plain_rules_alone():
    plain = get_protocol("alfworld50")
    assert plain.varied() is plain and plain.varied(max_turns=50, temperature=0.4) is plain
    assert plain.varied(max_turns=30).name == "alfworld50+max_turns=30"
    assert plain.varied(max_turns=30, temperature=0.0).name == "alfworld50+max_turns=30+temperature=0"
    assert plain.varied(max_turns=30).history_length == plain.history_length


@pytest.mark.parametrize(("environment", "name"), [("alfworld", "alfworld50"), ("scienceworld", "strict30")])
def test_each_environment_has_its_own_protocol(environment, name, tmp_path, monkeypatch):
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    types = (evaluation.EvaluationArguments, ModelConfig)
    suite, args, _ = parse_recipe(*types, argv=["--environment", environment])
    assert evaluation.load_protocol(args, suite).name == name


# ------------------------------------------------------------------------------------------------- examples in front


REACT = ("--prompt_template", "react", "--max_prompt_length", "4096")


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_a_number_says_that_it_was_few_shot_and_its_file_what_was_shown(play, tmp_path, context):
    reports = play(tmp_path / "r.json", *REACT, "--few_shot", "2", "--context", context)
    [name] = {report["protocol"]["name"] for report in reports}
    plain = "alfworld-tiny20+max_turns=2" + ("+context=concatenated" if context == "concatenated" else "")
    assert re.fullmatch(re.escape(plain) + r"\+few_shot=2-[0-9a-f]{8}", name)
    assert reports[0]["protocol"]["context"] == context and name.endswith(reports[0]["protocol"]["few_shot"])
    shown = json.loads((tmp_path / "r.json").read_text())["examples"]
    assert shown.count("which was solved") == 2 and "<think> The " in shown
    assert play(tmp_path / "bare.json", *REACT, "--context", context)[0]["protocol"]["name"] == plain
    assert json.loads((tmp_path / "bare.json").read_text())["examples"] == ""


def test_every_prompt_of_an_evaluation_shows_the_examples(play, monkeypatch):
    prompts = []
    call = RandomPolicy.__call__
    monkeypatch.setattr(RandomPolicy, "__call__", lambda self, ids: prompts.extend(ids) or call(self, ids))
    play(None, *REACT, "--few_shot", "1")
    assert len(prompts) == 2 * 8 * 2
    assert all(TOKENIZER.decode(ids).count("Example 1, which was solved.") == 1 for ids in prompts)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rules", ""], "protocol: expected one of .*, got ''"),
        (["--prompt_template", "scienceworld"], "prompt_template 'scienceworld'.*objects"),
        (["--few_shot", "1"], "prompt_template: .*'react', got 'alfworld'"),
        (["--few_shot", "1", "--few_shot_turns", "1", *REACT], "few_shot: got 1, but of 20 training tasks"),
        (["--few_shot", "1", *REACT[:3], "9"], r"max_prompt_length: expected .* \d+ tokens of .* its examples.*got 9"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_played(play, argv, says):
    with pytest.raises(ValueError, match=says):
        play(None, *argv, on_call=lambda: pytest.fail("something was played"))


# ------------------------------------------------------------------------------------------------------ interruption


def killed(run):
    """Runs a function in a fork that has to die by SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def die_at(count):
    """Returns a function that kills its process when it is called for the n-th time."""
    calls = []

    def call(*_):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return call


@pytest.mark.parametrize("calls", [1, 2, 4, 7])
def test_an_evaluation_that_was_killed_in_a_turn_goes_on_to_the_same_report(play, tmp_path, calls):
    whole = play(tmp_path / "whole.json")
    killed(lambda: play(tmp_path / "r.json", on_call=die_at(calls)))
    played = []
    assert play(tmp_path / "r.json", on_call=lambda: played.append(1)) == whole
    assert len(played) == 8 - 2 * ((calls - 1) // 2)  # two turns a part, and four parts
    kept = [f"{name}.json{end}" for name in ("r", "whole") for end in ("", ".episodes.jsonl")]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert (tmp_path / kept[1]).read_bytes() == (tmp_path / kept[3]).read_bytes()


@pytest.mark.parametrize("writes", range(1, 7))
def test_an_evaluation_that_was_killed_while_it_wrote_goes_on_to_the_same_report(play, tmp_path, monkeypatch, writes):
    whole = play(tmp_path / "whole.json")
    replace, die = os.replace, die_at(writes)

    def child():
        monkeypatch.setattr(os, "replace", lambda *paths: die() or replace(*paths))
        play(tmp_path / "r.json")

    killed(child)
    assert play(tmp_path / "r.json") == whole
    assert not (tmp_path / "r.json.parts").exists()


def test_episodes_of_an_evaluation_that_has_ended_can_be_watched(play, tmp_path):
    play(tmp_path / "r.json", "--keep_episodes", "3")
    ended = find_samples(tmp_path / "r.json")
    assert sorted(sample.split for sample in ended) == ["iid"] * 3 + ["ood"] * 3
    assert all(turn.response and turn.observation for sample in ended for turn in sample.episode.turns)
    play(tmp_path / "none.json", "--keep_episodes", "0")
    with pytest.raises(InputError, match="keep_episodes above 0, got .*none.json, which has no episodes"):
        find_samples(tmp_path / "none.json")


def test_a_second_evaluation_to_the_same_output_is_refused_while_the_first_plays(play, tmp_path):
    """Both would end well, and the later one would replace the report of the other."""
    codes = []

    def start_another():
        if codes:
            return
        child = os.fork()
        if child == 0:
            try:
                play(tmp_path / "r.json", "--seed", "1")
            except RunningError:
                os._exit(0)
            finally:
                os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    play(tmp_path / "r.json", on_call=start_another)
    assert codes == [0] and not list(tmp_path.glob("_running*"))


def test_the_same_command_on_a_finished_report_plays_nothing_and_shows_it(play, tmp_path, capsys):
    whole = play(tmp_path / "r.json")
    before, shown = (tmp_path / "r.json").read_bytes(), capsys.readouterr().out
    assert play(tmp_path / "r.json", on_call=lambda: pytest.fail("something was played")) == whole
    assert (tmp_path / "r.json").read_bytes() == before
    out = capsys.readouterr().out
    assert "is finished; nothing was played" in out and out.startswith(shown)


def test_two_policies_are_compared_on_the_games_that_they_share(play, tmp_path, capsys):
    play(tmp_path / "a.json")
    against = ("--seed", "1", "--compare_to", str(tmp_path / "a.json"))
    play(tmp_path / "b.json", *against)
    shown = capsys.readouterr().out
    for split in ("iid", "ood"):
        found = [next(r for r in reports_of(tmp_path / f) if r["split"] == split) for f in ("b.json", "a.json")]
        won = [dict(report["outcomes"]) for report in found]
        only = [sum(won[i][name] and not won[1 - i][name] for name in won[i]) for i in (0, 1)]
        assert re.search(
            rf"{split} against \S+a.json: both won \d+, only this {only[0]}, only the other {only[1]},", shown
        )
    play(tmp_path / "b.json", *against, on_call=lambda: pytest.fail("played"))
    assert "McNemar" in capsys.readouterr().out


def test_other_games_are_refused_before_anything_is_played(play, tmp_path):
    play(tmp_path / "a.json", "--splits", "iid")
    other = ("--splits", "iid", "--move_limit", "9", "--compare_to", str(tmp_path / "a.json"))
    with pytest.raises(InputError, match="compare_to: expected the same games.*move_limit: '30' there, '9' now"):
        play(None, *other, on_call=lambda: pytest.fail("played"))
    for changed, message in (((), "no report on 'ood'"), (("--splits", "iid", "--eval_episodes", "7"), "iid: 8 games")):
        with pytest.raises(InputError, match=f"compare_to: expected the same games .*{message}"):
            play(None, *changed, "--compare_to", str(tmp_path / "a.json"), on_call=lambda: pytest.fail("played"))


def test_an_outage_is_no_report_and_the_same_command_plays_what_it_spoiled(play, tmp_path, monkeypatch):
    whole = play(tmp_path / "whole.json")
    reset, calls = TreasureHunt.reset, []

    def broken(self, *, seed=None, options=None):
        if options["task_id"].startswith("ood"):
            raise EnvError("the server is gone")
        return reset(self, seed=seed, options=options)

    with monkeypatch.context() as patch:
        patch.setattr(TreasureHunt, "reset", broken)
        with pytest.raises(TooManyAborted, match="8 of 8 episodes of ood were aborted.*the server is gone"):
            play(tmp_path / "r.json")
        assert not (tmp_path / "r.json").exists()
    assert play(tmp_path / "r.json", on_call=lambda: calls.append(1)) == whole
    assert len(calls) <= 4  # the two parts of the other list, of two turns: the first list was kept


def test_a_list_with_the_same_names_and_other_contents_is_another_evaluation(tmp_path):
    settings = []
    for word in ("crane", "slate", "crane"):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"hidden": word}) + "\n")
        args = evaluation.EvaluationArguments(splits=["iid"], protocol="strict30", prompt_template="tools")
        suite = build_suite(list_tools(tmp_path / "rows.jsonl"))
        rules, lists = evaluation.load_protocol(args, suite), {"iid": suite.task_ids("iid")}
        settings.append(evaluation.result_settings(suite, args, ModelConfig("tiny"), rules, lists))
    assert {key for key in settings[0] if settings[0][key] != settings[1][key]} == {"contents"}
    assert settings[0] == settings[2]


def test_games_of_a_suite_made_in_python_are_those_of_its_fields():
    easy, hard = (evaluation.game_settings(TrapSuite(rooms), ["iid"]) for rooms in (1, 6))
    assert easy["environment"]["rooms"] == "1" and hard["environment"]["rooms"] == "6"
    assert evaluation.game_settings(TrapSuite(1), ["iid"]) == easy


def test_contents_are_told_apart_and_are_the_same_in_every_process():
    array = np.zeros(2000)
    rows = [{"grid": {(0, 0): "wall"}, "seen": {"b", "a"}, "image": array, "thing": object(), "number": np.int64(3)}]
    rows[0]["file"] = b"GIF"
    digest = content_digest(rows)
    assert digest == content_digest([dict(reversed(rows[0].items())) | {"thing": object(), "image": array.copy()}])
    array[1000] = 1
    assert digest != content_digest(rows)
    for key, other in (("grid", {(0, 0): "door"}), ("seen", {"a"}), ("file", b"PNG")):
        assert content_digest(rows) != content_digest([rows[0] | {key: other}])


def list_tools(rows):
    return ToolsArguments(factory="word_game:WordGame", iid_rows=str(rows), tool_rewards=["word_game:reward_func"])


def test_settings_of_the_chat_template_are_those_of_training():
    """A template with an empty thought if none is wanted, as Qwen3's."""
    template = QWEN + "{% if enable_thinking is defined and not enable_thinking %}<think> </think> {% endif %}"
    tokenizer, suite, shown = byte_tokenizer(template), ToySuite(), {}
    view = TurnView("a room", {"task": "t", "admissible_actions": ("look",)}, history=())
    for name, kwargs in (("with", '{"enable_thinking": false}'), ("without", None)):
        args = evaluation.EvaluationArguments(
            protocol="alfworld50", prompt_template="general", chat_template_kwargs=kwargs
        )
        rules = evaluation.load_protocol(args, suite)
        context = evaluation.protocol_context(rules, args, suite, tokenizer)
        (prompt,) = context.build([view])
        shown[name] = tokenizer.decode(prompt.ids)
    assert shown["with"] == shown["without"] + "<think> </think> "


@pytest.mark.parametrize("finished", [False, True])
def test_another_model_or_other_settings_in_the_same_output_are_refused_by_name(play, tmp_path, finished):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    (model / "model.safetensors").write_bytes(b"weights")
    output = tmp_path / "r.json"
    if finished:
        play(output, model=model)
    else:
        killed(lambda: play(output, model=model, on_call=die_at(5)))
    few = [*REACT, "--few_shot", "1"]
    for argv, named in ((["--seed", "1"], "seed: 0 there, 1 now"), (few, "protocol.few_shot")):
        with pytest.raises(ValueError, match=f"output: .*got .*r.json.* is of another evaluation .*{named}"):
            play(output, *argv, model=model)
    (model / "model.safetensors").write_bytes(b"other weights")
    said = "is of another evaluation .*weights: 'a folder of weights, .*delete that one to start over"
    with pytest.raises(ValueError, match=said):
        play(output, model=model)
    (model / "model.safetensors").write_bytes(b"weights")
    play(output, model=model.rename(tmp_path / "moved"))  # goes on


def test_a_file_that_is_no_report_is_not_overwritten(play, tmp_path):
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(ValueError, match="notes.txt is of another evaluation .*it has no settings"):
        play(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "precious"


# --------------------------------------------------------------------------------------------------- several processes


class Comm:
    """Two ranks of one evaluation as threads, which meet where processes would."""

    def __init__(self, monkeypatch):
        self.own, self.barrier, self.sent = threading.local(), threading.Barrier(2), {}
        monkeypatch.setattr(evaluation, "PartialState", lambda **_: self.own.state)
        monkeypatch.setattr(evaluation, "gather_object", self.gather)

    def gather(self, values):
        self.sent[self.own.state.process_index] = values
        self.barrier.wait()
        gathered = [*self.sent[0], *self.sent[1]]
        self.barrier.wait()
        return gathered

    def run(self, work):
        errors = []

        def rank(index):
            self.own.state = SimpleNamespace(
                num_processes=2, process_index=index, is_main_process=index == 0, wait_for_everyone=self.barrier.wait
            )
            try:
                work(index)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.barrier.reset()
        return [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]


def test_two_processes_share_the_lists_and_go_on_with_what_each_has_played(play, tmp_path, monkeypatch):
    ranks = Comm(monkeypatch)

    def evaluated(output, on_call=lambda: None):
        argv = ["--environment", TOY, "--model_name_or_path", "tiny"]
        argv += ["--eval_episodes", "8", "--parallel", "2", "--max_turns", "2", "--output", str(output)]
        monkeypatch.setattr(evaluation, "load", lambda *_: (RandomPolicy(on_call), TOKENIZER, None))
        return ranks.run(lambda index: evaluation.main(read_command_line(argv)))

    def interrupt():
        index = ranks.own.state.process_index
        calls.append(index)
        if index == 1 and calls.count(1) == 4:
            raise RuntimeError("rank 1 is gone")

    assert evaluated(tmp_path / "whole.json") == []
    whole = reports_of(tmp_path / "whole.json")
    assert [report["episodes"] for report in whole] == [8, 8]
    calls = []
    assert [str(error) for error in evaluated(tmp_path / "r.json", interrupt)] == ["rank 1 is gone"]
    calls.clear()
    assert evaluated(tmp_path / "r.json", lambda: calls.append(0)) == []
    assert reports_of(tmp_path / "r.json") == whole
    assert len(calls) < 16


# --------------------------------------------------------------------------------------------------------------- vLLM


class FakeEngine:
    """Stands for `vllm.LLM` and its engine: answers the first id of the prompt, a request at a step, the last first."""

    def __init__(self, **kwargs):
        self.kwargs, self.params = kwargs, []
        self.llm_engine, self.pending = self, []

    def add_request(self, request_id, prompt, params):
        self.params.append(params)
        self.pending.append((request_id, prompt, params))

    def step(self):
        request_id, prompt, params = self.pending.pop()
        answer = SimpleNamespace(token_ids=self.answer(prompt["prompt_token_ids"], params), logprobs=None)
        return [SimpleNamespace(request_id=request_id, finished=True, outputs=[answer])]

    def answer(self, ids, params):
        return ids[:1]


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeEngine, dict
    module.sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final only"))
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module.sampling_params)


def test_as_an_engine_vllm_draws_by_episode_and_turn_in_whatever_order(vllm, saved):
    policy, _ = load_vllm_policy(ModelConfig(str(saved)), max_new_tokens=20, temperature=1.0)

    def seeds(policy, numbers):
        found = {}
        for number in numbers:
            policy.submit(number, [5])
            found.setdefault(number, []).append(policy.llm.params[-1]["seed"])
            (response,) = policy.collect(None)
            assert (response.number, response.ids[0], response.logprobs) == (number, 5, None)
        return found

    first, other = seeds(policy.seeded(7), [0, 1, 0, 1]), seeds(policy.seeded(7), [1, 1, 0, 0])
    assert first == other and len({seed for found in first.values() for seed in found}) == 4
    assert seeds(policy.seeded(7, [4, 1]), [1, 1]) == {1: first[1]}, "episodes by their place in the whole list"
    assert seeds(policy.seeded(8), [0]) != {0: first[0][:1]}


def random_vllm(on_call):
    """Returns a policy on a stand-in for vLLM that opens boxes at random, by the seed of the request."""

    class Random(FakeEngine):
        def answer(self, ids, params):
            return RandomPolicy(on_call, params["seed"])([ids])[0][0]

    return VllmPolicy(Random(), [TOKENIZER.eos_token_id], max_new_tokens=20, temperature=1.0)


def test_with_vllm_whole_lists_are_played_and_a_killed_evaluation_goes_on_to_the_same_report(vllm, play, tmp_path):
    """Two lists of eight tasks in parts of four, two turns each: 32 responses."""
    counted = []
    whole = play(tmp_path / "whole.json", make=random_vllm, on_call=lambda: counted.append(1))
    assert len(counted) == 32
    for calls in (5, 14, 29):
        killed(lambda calls=calls: play(tmp_path / f"{calls}.json", make=random_vllm, on_call=die_at(calls)))
        left = []
        report = play(tmp_path / f"{calls}.json", make=random_vllm, on_call=lambda left=left: left.append(1))
        assert report == whole and len(left) in (32, 24, 16, 8)
    assert len(left) < 32, "finished parts are not played again"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    TOKENIZER.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    return folder


def test_vllm_gets_the_ids_and_the_rules_as_they_are(vllm, saved):
    policy, tokenizer = load_vllm_policy(
        ModelConfig(str(saved), dtype="float32"), max_new_tokens=20, temperature=0.4, max_model_len=100, gpu_share=0.5,
        trust_remote_code=True, several_processes=True,
    )  # fmt: skip
    expected = {
        "trust_remote_code": True, "model": str(saved), "max_model_len": 100, "dtype": "float32",
        "gpu_memory_utilization": 0.5, "distributed_executor_backend": "external_launcher",
    }  # fmt: skip
    assert expected.items() <= policy.llm.kwargs.items()
    params = policy.make_params(0)
    assert 0 <= params.pop("seed") < 2**63  # vLLM's seeds are signed
    assert params == {
        "stop_token_ids": [tokenizer.eos_token_id, 7], "max_tokens": 20, "temperature": 0.4,
        "detokenize": False, "flat_logprobs": True, "output_kind": "final only",
    }  # fmt: skip


def test_what_vllm_cannot_play_is_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"an adapter, with backend='vllm'; .*epo-trl merge"):
        load_vllm_policy(ModelConfig(str(tmp_path)), max_new_tokens=20, temperature=1.0)
    with pytest.raises(ValueError, match=r"load_in_4bit, load_in_8bit: expected backend='transformers', got True"):
        load_vllm_policy(ModelConfig("some/model", load_in_4bit=True), max_new_tokens=20, temperature=1.0)
