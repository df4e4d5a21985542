"""The command line passes on what was typed, and answers bad input with one line."""

import subprocess
import sys
import types
from importlib import import_module

import pytest
from event_files import write_run

from epo_trl.cli import COMMANDS, MODULES
from epo_trl.envs import EnvError
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.alfworld.task_specs import Filters


@pytest.fixture
def fake_module(monkeypatch):
    """Puts a module with one function in place; returns the calls that it got."""

    def put(name, function, answer):
        calls = []

        def record(*args, **kwargs):
            calls.append((args, kwargs))
            if isinstance(answer, Exception):
                raise answer
            return answer

        module = types.ModuleType(name)
        setattr(module, function, record)
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return put


GENERATOR = ("epo_trl.envs.alfworld.generator", "write_games")
COUNTS = ["--train", "3", "--valid-seen", "2", "--valid-unseen", "0"]


def test_plot_writes_the_image_and_says_where(tmp_path, command):
    write_run(tmp_path / "run", seed=0, steps=10)
    words = ("plot", tmp_path / "run", "--out", tmp_path / "curves", "--labels", "mine", "--window", "3")
    assert command(*words)[:2] == (0, f"wrote {tmp_path / 'curves.png'}\n")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["missing"], "missing (not a directory)"), (["a", "b", "--labels", "c"], "got 1 for 2 runs")],
)
def test_plot_answers_bad_input_with_one_line(tmp_path, command, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, error = command("plot", *arguments, "--out", "x.png")
    assert code == 1 and message in error and error.count("\n") == 1


def test_games_passes_on_the_numbers_and_the_filters(fake_module, command):
    calls = fake_module(*GENERATOR, None)
    words = ("games", "alfworld", "--out", "d", *COUNTS)
    assert command(*words, "--seed", "7")[0] == 0
    assert command(*words, "--task-types", *TASK_TYPES[:2], "--max-receptacles", "16")[0] == 0
    assert calls[0] == (("d", 3, 2, 0, 7, Filters()), {})
    assert calls[1] == (("d", 3, 2, 0, 0, Filters(TASK_TYPES[:2], None, 16)), {})


def test_an_environment_error_is_one_line_without_traceback(fake_module, command):
    fake_module(*GENERATOR, EnvError("games: the room type\n'\x1b[31mgarage' does not exist"))
    error = "epo-trl: error: games: the room type '\\x1b[31mgarage' does not exist\n"
    assert command("games", "alfworld", "--out", "d", *COUNTS) == (1, "", error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["games", "alfworld", "--out", "d", "--train", "-1", "--valid-seen", "1", "--valid-unseen", "1"], ">= 0"),
        (["plot", "run", "--out", "x.png", "--window", "0"], ">= 1"),
        (["games", "minecraft"], "alfworld"),
        (["memory"], "--config"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message, command):
    code, _, error = command(*arguments)
    assert code == 2 and message in error


def test_a_command_is_a_line_of_the_help_and_a_module_and_neither_loads_torch():
    assert len(MODULES) == sum(map(len, COMMANDS.values()))
    assert all(callable(import_module(module).main) for module, _ in MODULES.values())
    names = [module for module, recipe in MODULES.values() if not recipe]
    script = f"import sys\nfor name in {names}: __import__(name)\n"
    script += "sys.modules['epo_trl.cli'].main([])\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *shown, torch_was_loaded = done.stdout.splitlines()
    assert torch_was_loaded == "False"
    assert len(shown) < 40, "more than a page"
    for name, (_, _, text) in [line for group in COMMANDS.values() for line in group.items()]:
        assert [line.split() for line in shown].count([name, *text.split()]) == 1
