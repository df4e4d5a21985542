"""One rank of `distributed_worker.py` on the stand-in device: two devices, and a backend that refuses CPU tensors."""

import stand_in

stand_in.install(devices=2)

import distributed_worker  # noqa: E402
import trainer_kit  # noqa: E402

if __name__ == "__main__":
    trainer_kit.USE_CPU = False
    distributed_worker.BACKEND = "nccl"
    distributed_worker.main()
