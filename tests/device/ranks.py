"""One rank of `distributed_worker.py` on a GPU, or on a stand-in for one: by a backend that refuses CPU tensors.

`{ddp,zero3}-alone-METHOD`: two RL steps of two updates each in bfloat16, in a single rank; then once more from the
checkpoint inside the second.
"""

import os

import gpu

if not gpu.COUNT:
    import stand_in

    stand_in.install(devices=2)

import distributed_worker  # noqa: E402
import torch  # noqa: E402
import trainer_kit  # noqa: E402

ALONE = {
    "steps_per_generation": 2, "per_device_train_batch_size": trainer_kit.ROWS // 2, "max_steps": 4, "bf16": True,
    "epo_lambda": 0.3, "save_strategy": "steps", "save_steps": 3, "trust_checkpoint": True,
}  # fmt: skip


def train_alone(rank, mode, folder, method):
    make, passes = {"grpo": trainer_kit.make_trainer, "ppo": trainer_kit.make_ppo}[method], {}
    if mode == "zero3":
        trainer_kit.saved(trainer_kit.make_model().to(torch.bfloat16), folder / "start")
        passes = {
            "model": str(folder / "start"), "model_init_kwargs": {"dtype": "bfloat16"},
            "deepspeed": {**distributed_worker.ZERO3, "bf16": {"enabled": "auto"}},
        }  # fmt: skip
    weights, results = {}, []
    for name, checkpoint in (("straight", None), ("resumed", str(folder / "straight" / "checkpoint-3"))):
        trainer = make(folder / name, **ALONE, **passes)
        weights.setdefault("start", distributed_worker.gathered(trainer.model))
        trainer.train(resume_from_checkpoint=checkpoint)
        weights[name] = distributed_worker.gathered(trainer.model)
        kind, device = str(trainer.accelerator.distributed_type), trainer.accelerator.device.type
        results.append({"kind": kind, "device": device, "rl_step": trainer.rl_step, "log": trainer.state.log_history})
        distributed_worker.forget_the_mode()
    distributed_worker.leave(rank, folder, weights, results)


if __name__ == "__main__":
    if gpu.COUNT:
        gpu.compute_in_float32()
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # DeepSpeed never reads its padding
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    trainer_kit.USE_CPU = False
    distributed_worker.BACKEND = "nccl"
    distributed_worker.METHODS["alone"] = train_alone
    distributed_worker.main()
