"""Environments in worker processes: a game that hangs or crashes costs its own episodes, not the run."""

from epo_trl.envs.pool.pooled_suite import PooledEnv, PooledSuite
from epo_trl.envs.pool.worker import PoolSettings, WorkerLost

__all__ = ["PoolSettings", "PooledEnv", "PooledSuite", "WorkerLost"]
