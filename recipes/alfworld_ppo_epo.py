"""PPO + EPO (arXiv 2509.22576) on ALFWorld: advantages from a critic, turn by turn; no groups.

On 8 GPUs, with the real games in $ALFWORLD_DATA:

    accelerate launch --config_file accelerate_configs/zero3.yaml recipes/alfworld_ppo_epo.py \
        --config recipes/alfworld/ppo_qwen2.5-3b_8gpu.yaml

On a laptop, with generated games and a tiny model, after its warm start (`make train ALGO=ppo_epo` runs both):

    python recipes/sft.py --config recipes/alfworld/sft_tiny_cpu.yaml
    python recipes/alfworld_ppo_epo.py --config recipes/alfworld/ppo_tiny_cpu.yaml

`--epo_lambda 0` is plain PPO. Options and resuming are those of recipes/train.py.
"""

from epo_trl.cli.program import run_recipe_file

if __name__ == "__main__":
    run_recipe_file("train", environment="alfworld", algorithm="ppo")
