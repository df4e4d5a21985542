"""GRPO + EPO (arXiv 2509.22576) on ALFWorld.

On 8 GPUs, with the real games in $ALFWORLD_DATA:

    accelerate launch --config_file accelerate_configs/zero3.yaml recipes/alfworld_grpo_epo.py \
        --config recipes/alfworld/qwen2.5-3b_8gpu.yaml

On a laptop, with generated games and a tiny model (`make train` does this after a warm start):

    python recipes/alfworld_grpo_epo.py --config recipes/alfworld/tiny_cpu.yaml

Every field of the config can be overridden on the command line, for example `--epo_lambda 0` for plain GRPO. A run
that was interrupted goes on from its last checkpoint when it is started again.
"""

from trl import ModelConfig, TrlParser

from epo_trl.envs.alfworld.arguments import AlfworldArguments
from epo_trl.experiment import train
from epo_trl.trainers import EPOConfig


def main() -> None:
    """Parses the configuration and trains."""
    games, args, model_args = TrlParser((AlfworldArguments, EPOConfig, ModelConfig)).parse_args_and_config()
    train(games.make_suite(), args, model_args)


if __name__ == "__main__":
    main()
