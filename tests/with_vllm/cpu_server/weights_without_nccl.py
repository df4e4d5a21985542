"""Weight transfer to a vLLM server without a GPU: NCCL's protocol and messages, with a TCP store to carry the tensors.

For tests. `register` runs in every process of vLLM; `patch_client` in the trainer's, where TRL's own client stays in
charge of everything but the transport.
"""

import functools
from typing import Any

import torch

BACKEND = "cpu_store"


def keep_linear_weights() -> None:
    """On a CPU vLLM packs the weights of Linear layers and drops the originals, which a later transfer needs."""
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep


@functools.cache  # vLLM may call it again
def register() -> None:
    """Makes the engine known."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    keep_linear_weights()
    WeightTransferEngineFactory.register_engine(BACKEND, "weights_without_nccl", "make_engine")


def make_engine(*args: Any, **kwargs: Any) -> Any:
    """Returns the receiving end. The class is made here because its parent needs vLLM."""
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class StoreEngine(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info: Any) -> None:
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
            self.model_update_group = StatelessProcessGroup.create(
                init_info.master_address, init_info.master_port, rank, init_info.world_size
            )

        def receive_weights(self, update_info: Any) -> None:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = self.model_update_group.broadcast_obj(None, src=0)
                if tuple(weight.shape) != tuple(shape) or str(weight.dtype) != f"torch.{dtype}":
                    raise ValueError(f"{name}: announced {dtype} {shape}, got {weight.dtype} {tuple(weight.shape)}")
                self.model.load_weights([(name, weight)])

    return StoreEngine(*args, **kwargs)


def patch_client() -> None:
    """Lets TRL's client send weights from a CPU."""
    import trl.generation.vllm_client as client
    import trl.generation.vllm_generation as generation
    from vllm.distributed.utils import StatelessProcessGroup

    def open_endpoint(info: dict[str, Any]) -> Any:
        return StatelessProcessGroup.create(info["master_address"], info["master_port"], 0, info["world_size"])

    def send(iterator: Any, group: Any, src: int, post_iter_func: Any) -> None:
        for item in iterator:
            group.broadcast_obj(post_iter_func(item).detach().cpu().contiguous(), src=src)

    class Client(client.VLLMClient):
        def init_communicator(self, device: Any = 0) -> None:
            super().init_communicator(torch.device("cuda"))  # only its type is looked at

        def close_communicator(self) -> None:
            self.communicator = None

    client.open_trainer_endpoint, client.packed_nccl_broadcast_producer = open_endpoint, send
    generation.VLLMClient = Client
