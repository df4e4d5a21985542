"""PPO + EPO (arXiv 2509.22576) on ScienceWorld: advantages from a critic, turn by turn; no groups.

On 8 GPUs:

    accelerate launch --config_file accelerate_configs/zero3.yaml recipes/scienceworld_ppo_epo.py \
        --config recipes/scienceworld/ppo_qwen2.5-7b_8gpu.yaml

On a laptop, with a tiny model, after its warm start (`make train ENV=scienceworld ALGO=ppo_epo` runs both):

    python recipes/sft.py --config recipes/scienceworld/sft_tiny_cpu.yaml
    python recipes/scienceworld_ppo_epo.py --config recipes/scienceworld/ppo_tiny_cpu.yaml

`--epo_lambda 0` is plain PPO. Options and resuming are those of recipes/train.py.
"""

from epo_trl.cli.program import run_recipe_file

if __name__ == "__main__":
    run_recipe_file("train", environment="scienceworld", algorithm="ppo")
