"""PPO + EPO (arXiv 2509.22576) on WebShop: advantages from a critic, turn by turn; no groups.

On one GPU, with the release's files in $WEBSHOP_DATA:

    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/webshop_ppo_epo.py \
        --config recipes/webshop/ppo_qwen2.5-1.5b_1gpu.yaml

On a laptop, in a generated shop with a tiny model, after its warm start (`make train ENV=webshop ALGO=ppo_epo` runs
both):

    python recipes/sft.py --config recipes/webshop/sft_tiny_cpu.yaml
    python recipes/webshop_ppo_epo.py --config recipes/webshop/ppo_tiny_cpu.yaml

`--epo_lambda 0` is plain PPO. Options and resuming are those of recipes/train.py.
"""

from epo_trl.cli.program import run_recipe_file

if __name__ == "__main__":
    run_recipe_file("train", environment="webshop", algorithm="ppo")
