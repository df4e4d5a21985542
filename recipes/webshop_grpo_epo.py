"""GRPO + EPO (arXiv 2509.22576) on WebShop.

On 8 GPUs, with the release's files in $WEBSHOP_DATA:

    accelerate launch --config_file accelerate_configs/zero3.yaml recipes/webshop_grpo_epo.py \
        --config recipes/webshop/qwen2.5-7b_8gpu.yaml

On a laptop, in a generated shop with a tiny model, after its warm start (`make train ENV=webshop` runs both):

    python recipes/sft.py --config recipes/webshop/sft_tiny_cpu.yaml
    python recipes/webshop_grpo_epo.py --config recipes/webshop/tiny_cpu.yaml

`--epo_lambda 0` is plain GRPO. Options and resuming are those of recipes/train.py.
"""

from epo_trl.cli.program import run_recipe_file

if __name__ == "__main__":
    run_recipe_file("train", environment="webshop", algorithm="grpo")
