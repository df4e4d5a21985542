"""PPO + EPO (arXiv 2509.22576) on ScienceWorld: advantages from a critic, turn by turn; no groups.

On 8 GPUs:

    accelerate launch --config_file accelerate_configs/zero3.yaml recipes/scienceworld_ppo_epo.py \
        --config recipes/scienceworld/ppo_qwen2.5-7b_8gpu.yaml

On a laptop, with a tiny model (`make train ENV=scienceworld ALGO=ppo_epo` does this after a warm start):

    python recipes/scienceworld_ppo_epo.py --config recipes/scienceworld/ppo_tiny_cpu.yaml

Every field of the config can be overridden on the command line, for example `--epo_lambda 0` for plain PPO or
`--credit token`. A run that was interrupted goes on from its last checkpoint when it is started again.
"""

import epo_trl.threads  # noqa: F401 - before torch

from trl import ModelConfig

from epo_trl.experiment import train
from epo_trl.recipe import parse_recipe, run_recipe
from epo_trl.trainers import EPOPPOConfig, EPOPPOTrainer


def main() -> None:
    """Parses the configuration and trains."""
    train(*parse_recipe(EPOPPOConfig, ModelConfig, environment="scienceworld"), trainer_class=EPOPPOTrainer)


if __name__ == "__main__":
    run_recipe(main, configs=["scienceworld/ppo_*"])
