"""The judge of recipes/judge: a function and a scripted endpoint, its failures, its cache, and a run."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from trainer_kit import catch_step, make_trainer

from epo_trl.methods import StepSummary
from epo_trl.types import Episode, StopReason, Turn

CUT_OFF = "an answer that is shorter than announced"
FOLDER = Path(__file__).parents[1] / "recipes" / "judge"


@pytest.fixture(autouse=True)
def _path(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    (tmp_path / "own_judge.py").write_text("def score(episode):\n    return [0.5 for _ in episode.turns]\n")
    monkeypatch.syspath_prepend(str(tmp_path))


class ScriptedEndpoint:
    """An OpenAI-compatible server that answers by a script: a status code, or the content of a chat answer."""

    def __init__(self, answers: Iterator[int | str]):
        self.requests = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append((self.path, self.headers.get("Authorization"), body))
                answer = next(answers)
                self.send_response(answer if isinstance(answer, int) else 200)
                if answer == CUT_OFF:
                    self.send_header("Content-Length", "9")
                self.end_headers()
                if isinstance(answer, str) and answer != CUT_OFF:
                    self.wfile.write(json.dumps({"choices": [{"message": {"content": answer}}]}).encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def serve():
    made = []

    def start(answers):
        made.append(ScriptedEndpoint(iter(answers)))
        return made[-1]

    yield start
    for endpoint in made:
        endpoint.server.shutdown()
        endpoint.server.server_close()


def judge(tmp_path, **settings):
    from judge import Judge

    return Judge(**{"weight": 0.1, "retry_seconds": 0.0, "cache": str(tmp_path / "cache"), **settings})


def episode(*actions, stop=StopReason.TURN_LIMIT):
    turns = tuple(Turn((1,), (2,), "", "a room", action, True, 1.0) for action in actions)
    return Episode("train/0", "leave", "", turns, stop)


def test_an_endpoint_is_asked_again_until_it_gives_scores_and_never_twice_for_an_episode(tmp_path, serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    answers = [500, CUT_OFF, "I cannot say.", "[0.5]", "[2, 0]", "Here: [1, 0.25] </s><|im_end|>"]
    endpoint = serve(answers)
    one = judge(tmp_path, url=endpoint.url, model="m", retries=5)
    assert one.turn_rewards(episode("look", "open door")) == [1.1, 1.025]
    assert len(endpoint.requests) == len(answers)
    path, key, body = endpoint.requests[0]
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "m")
    shown = json.loads(body["messages"][1]["content"])
    assert [turn["action"] for turn in shown["turns"]] == ["look", "open door"] and shown["task"] == "leave"
    again = judge(tmp_path, url=endpoint.url, model="m")
    assert again.turn_rewards(episode("look", "open door")) == [1.1, 1.025]
    assert len(endpoint.requests) == len(answers)
    assert again.end_rl_step(StepSummary(0.0, {})) == {"judge/score": 0.625, "judge/failed": 0.0}


def test_an_episode_without_scores_keeps_its_rewards_and_a_step_without_any_stops_the_run(tmp_path, serve):
    endpoint = serve(["nothing", "[1]", "nothing"])
    one = judge(tmp_path, url=endpoint.url, retries=0)
    assert one.turn_rewards(episode("look")) is None
    assert one.turn_rewards(episode("wait")) == [1.1]
    assert one.turn_rewards(episode("look", stop=StopReason.ABORTED)) is None
    assert one.end_rl_step(StepSummary(0.0, {})) == {"judge/score": 1.0, "judge/failed": 0.5}
    assert one.turn_rewards(episode("look")) is None
    with pytest.raises(RuntimeError, match=r"no scores for any of 1 episodes \(expected a JSON list, .*\); check"):
        one.end_rl_step(StepSummary(0.0, {}))


def test_a_refused_request_ends_the_run_at_once(tmp_path, serve):
    endpoint = serve([401])
    with pytest.raises(ValueError, match="refused the request: 401"):
        judge(tmp_path, url=endpoint.url).turn_rewards(episode("look"))
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_an_episode_that_the_endpoint_refuses_has_no_scores_and_is_not_sent_again(tmp_path, serve, status):
    """As one that is longer than the context of the judge's model."""
    endpoint = serve([status, "[1]"])
    one = judge(tmp_path, url=endpoint.url)
    assert one.turn_rewards(episode("look")) is None
    assert one.turn_rewards(episode("wait")) == [1.1]
    assert len(endpoint.requests) == 2
    assert one.end_rl_step(StepSummary(0.0, {})) == {"judge/score": 1.0, "judge/failed": 0.5}


def test_an_endpoint_that_does_not_answer_in_time_gives_no_scores(tmp_path, serve):
    release = threading.Event()

    def late():
        release.wait(20)
        yield "[1]"

    endpoint = serve(late())
    assert judge(tmp_path, url=endpoint.url, retries=0, timeout_seconds=0.3).turn_rewards(episode("look")) is None
    release.set()


def test_a_function_is_a_judge(tmp_path):
    assert judge(tmp_path, function="own_judge:score").turn_rewards(episode("look", "wait")) == [1.05, 1.05]


def test_a_run_learns_from_the_scores(tmp_path, serve):
    """A judge that likes the first turn: its scores are in the rewards of the collected batch."""

    def answers():
        while True:
            count = len(json.loads(endpoint.requests[-1][2]["messages"][1]["content"])["turns"])
            yield json.dumps([1.0] + [0.0] * (count - 1))

    endpoint = serve(answers())
    settings = {"url": endpoint.url, "weight": 2.0, "cache": str(tmp_path / "cache")}
    trainer = make_trainer(
        tmp_path / "run", policy_method="judge:Judge", method_kwargs={"judge:Judge": settings},
        gradient_accumulation_steps=1, invalid_action_penalty=0.0,
    )  # fmt: skip
    catch_step(trainer)
    assert endpoint.requests
    (logged,) = [line for line in trainer.state.log_history if "judge/score" in line]
    assert logged["judge/failed"] == 0 and 0 < logged["judge/score"] <= 1
    assert logged["reward"] == pytest.approx(logged["env/return"] + 2.0)
