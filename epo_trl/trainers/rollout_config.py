"""Settings of a multi-turn rollout in training."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.bounds import Count, CountOrZero, Positive, Share, option
from epo_trl.rollout.rules import RewardArguments
from epo_trl.rollout.spec import EpisodeArguments, ResponseArguments


@dataclass
class RolloutArguments(ResponseArguments, EpisodeArguments, RewardArguments):
    """Settings of the rollout in training."""

    env_workers: CountOrZero = option(
        0,
        "Number of worker processes per rank for the environments; 0 runs them in the trainer's process, which is "
        "faster for ALFWorld's fast engine. ScienceWorld has Java processes of its own.",
    )
    env_step_seconds: Positive = option(60.0, "Seconds per environment step before its worker is killed and replaced.")
    env_reset_seconds: Positive = option(
        120.0, "Seconds per environment reset before its worker is killed and replaced."
    )
    env_reset_retries: CountOrZero = option(
        2, "Number of times a reset is retried after its worker died or was killed."
    )
    rollout_ahead: CountOrZero = option(
        0,
        "Number of RL steps that the rollout runs ahead of the updates, and thus the largest age of the weights that "
        "play a batch; only with a vLLM server. 0 plays and updates in turn.",
    )
    request_seeds: bool = option(
        False,
        "Whether vLLM samples each response from its own seed (run, RL step, episode, turn), so that the samples do "
        "not depend on the order of the requests. It then draws for each sequence in turn, which is slower.",
    )
    simulated_lag: CountOrZero = option(
        0,
        "Number of RL steps that the acting policy is behind the trained one, to study off-policy data. 0 is "
        "on-policy.",
    )
    lag_correction: bool = option(
        True,
        "Whether to weight the advantages of lagged data by importance weights, at most "
        "`vllm_importance_sampling_clip_max` per token.",
    )
    keep_episodes: CountOrZero = option(
        4,
        "Number of episodes per selected RL step to save in output_dir for `epo-trl watch`: the worst, the best, an "
        "aborted one, and random ones. 0 saves none.",
    )
    keep_episodes_steps: Count | None = option(
        None, "Save episodes every N RL steps, and at the last one; defaults to a fiftieth of the run."
    )
    max_aborted_share: Share = option(
        0.5,
        "Largest share of a batch that errors may abort. Above it, all ranks save a checkpoint and stop. 1 never "
        "stops.",
    )
