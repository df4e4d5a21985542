"""Environments in processes of their own: a game that hangs or kills its process costs its episodes, not the run."""

from epo_trl.envs.pool.env import PooledEnv
from epo_trl.envs.pool.settings import PoolSettings
from epo_trl.envs.pool.suite import PooledSuite
from epo_trl.envs.pool.worker import WorkerLost

__all__ = ["PoolSettings", "PooledEnv", "PooledSuite", "WorkerLost"]
