"""Ctrl-C in a command saves a checkpoint as SIGTERM does and ends with 130; in a notebook it stays Python's."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import forked
import psutil
import pytest
from launcher import start_program
from run_kit import SendSignals, left, recipe
from trainer_kit import make_trainer

from epo_trl.cli.program import EXIT_CODE, INTERRUPTED, STOPPING, run_recipe

ROOT = Path(__file__).parents[1]
PROGRAM = ("train", "train.py", ["--environment", "trap"])


@pytest.fixture
def python_s_own_handler():
    """Tests that run in the background inherit that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press(line):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def test_before_training_ctrl_c_is_one_line_and_130(python_s_own_handler, capfd):
    with pytest.raises(SystemExit) as end:
        run_recipe(*PROGRAM, press)
    assert end.value.code == EXIT_CODE == 130
    assert capfd.readouterr().err == f"\ntrain.py: {INTERRUPTED}\n"
    assert signal.getsignal(signal.SIGINT) is python_s_own_handler


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_steps", "code", "saved", "has_ended"), [(3, [130], ["checkpoint-1"], False), (1, [], [], True)]
)
def test_while_training_ctrl_c_saves_a_checkpoint(
    max_steps, code, saved, has_ended, tmp_path, monkeypatch, capfd, python_s_own_handler
):
    """In the last step the run ends as any other."""
    main, _ = recipe(monkeypatch, tmp_path, SendSignals("on_step_begin", 0, signal.SIGINT), max_steps=max_steps)
    ends = []
    try:
        run_recipe(*PROGRAM, main)
    except SystemExit as end:
        ends.append(end.code)
    assert ends == code and left(tmp_path) == saved
    assert (tmp_path / "model.safetensors").exists() == has_ended
    assert f"train.py: {STOPPING}\n" in (said := capfd.readouterr().err) and "Traceback" not in said


@pytest.mark.slow
def test_in_a_notebook_ctrl_c_is_a_keyboard_interrupt_at_once(tmp_path, python_s_own_handler):
    trainer = make_trainer(tmp_path, callbacks=[SendSignals("on_step_begin", 0, signal.SIGINT)], max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 0 and left(tmp_path) == []


# ------------------------------------------------------------------------------------------------- whole processes


STARTED = []


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Kills what a test started and did not end, as when a wait fails. Ranks have process groups of their own."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            leader = psutil.Process(process.pid)
            for each in [leader, *leader.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait(10)


def start(folder, *words, fresh=False, **environment):
    """Starts a program in its own process group, as a terminal does, in a fork unless `fresh`; it logs in `folder`."""
    log, environment = folder / "log.txt", {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment}
    run, inherited = (start_program, os.environ) if fresh else (forked.start, {})
    STARTED.append(run(words, cwd=folder, log=log, **inherited | environment))
    return STARTED[-1], log


def wait_for(process, log, text, seconds=240):
    end = time.monotonic() + seconds
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.05)


RECIPE = """
import os, signal, sys, time
from pathlib import Path
pressed = []
signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
print("ready", flush=True)
while not pressed:
    time.sleep(0.01)
signal.signal(signal.SIGINT, signal.SIG_DFL)
time.sleep(float(os.environ["SAVES"]))
print("saved", flush=True)
sys.exit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("presses", "seconds"), [(1, "1"), (2, "60")])
def test_make_train_waits_until_its_recipe_has_saved_but_not_after_a_second_ctrl_c(tmp_path, presses, seconds):
    folder = tmp_path / "recipes"
    (folder / "alfworld").mkdir(parents=True)
    (folder / "make_train.py").write_bytes((ROOT / "recipes" / "make_train.py").read_bytes())
    (folder / "sft.py").write_text(RECIPE)
    (folder / "alfworld" / "sft_tiny_cpu.yaml").write_text("")
    process, log = start(tmp_path, folder / "make_train.py", SAVES=seconds)
    wait_for(process, log, "ready")
    for _ in range(presses):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    assert process.wait(30) == 130
    said = log.read_text()
    ended = re.search(r"saved\n(?s:.*)interrupted; run the same command again", said)
    assert bool(ended) == (presses == 1) and "Traceback" not in said


LONG = "--output_dir run --episodes 64 --max_steps 2000 --logging_steps 1 --report_to none --seed 0".split()


def imitate(folder, *words, **how):
    return start(folder, "-m", "epo_trl.cli", "sft", *words, "--config", "trap/sft_tiny_cpu", *LONG, **how)


@pytest.mark.slow
def test_the_command_saves_and_ends_with_130_and_goes_on_afterwards(tmp_path):
    """Without a warning of any library, while it is imported or later."""
    process, log = imitate(tmp_path, fresh=True)
    wait_for(process, log, "'loss'")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    said = log.read_text()
    (saved,) = left(tmp_path / "run")
    assert said.count(STOPPING) == 1 and "Traceback" not in said and said.rstrip().splitlines()[-1].strip()
    assert [line for line in said.splitlines() if "warn" in line.lower()] == []
    again, log = imitate(tmp_path)
    wait_for(again, log, "'loss'")
    os.killpg(again.pid, signal.SIGINT)
    assert again.wait(120) == 130
    assert max(int(name.partition("-")[2]) for name in left(tmp_path / "run")) > int(saved.partition("-")[2])


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_command_at_once(tmp_path):
    process, log = imitate(tmp_path)
    wait_for(process, log, "'loss'")
    os.kill(process.pid, signal.SIGINT)
    wait_for(process, log, STOPPING)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(20) in (-signal.SIGINT, 130)
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_two_ranks_under_accelerate_save_one_checkpoint(tmp_path):
    process, log = imitate(tmp_path, "--accelerate_config", "multi_gpu", "--num_processes", "2")
    wait_for(process, log, "'loss'")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) != 0
    said = log.read_text()
    assert said.count(STOPPING) == 1 and len(left(tmp_path / "run")) == 1, said[-3000:]


@pytest.mark.slow
def test_one_process_under_accelerate_saves_on_sigterm_and_ends_with_143(tmp_path):
    process, log = imitate(tmp_path, "--accelerate_config", "cpu")
    wait_for(process, log, "'loss'")
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(120) == 143
    assert len(left(tmp_path / "run")) == 1
