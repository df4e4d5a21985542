"""A training run goes on when a worker of its environments is killed, and its log tells."""

import os
import signal

import pytest
from processes import is_running
from run_kit import logged
from trainer_kit import make_trainer
from wild_games import WildSuite

from epo_trl.envs.pool import PooledEnv


@pytest.mark.slow
def test_a_run_goes_on_when_a_worker_is_killed_and_counts_it(tmp_path):
    limits = {"env_workers": 2, "env_step_seconds": 20.0}
    trainer = make_trainer(tmp_path, suite=WildSuite(tmp_path), max_steps=3, epo_lambda=0.1, **limits)
    assert all(isinstance(env, PooledEnv) for env in trainer.envs) and trainer.envs, "the first one, made early, too"
    assert trainer.suite._given[:2] == (2, 20.0)
    generate, calls, pids = trainer._generate_single_turn, [], set()

    def kill_in_the_second_rollout(*arguments):
        pids.update(worker._process.child.pid for worker in trainer.suite._workers)
        calls.append(arguments)
        if len(calls) == 5:
            os.kill(trainer.suite._workers[0]._process.child.pid, signal.SIGKILL)
        return generate(*arguments)

    trainer._generate_single_turn = kill_in_the_second_rollout
    trainer.train()
    assert logged(trainer, "env/aborted") == [0.0, 0.5, 0.0]
    assert logged(trainer, "env/restarts") == [0.0, 0.0, 1.0]
    assert logged(trainer, "env/timeouts") == logged(trainer, "env/retries") == [0.0] * 3
    assert len(pids) == 3
    trainer.close_envs()
    assert not any(map(is_running, pids))
