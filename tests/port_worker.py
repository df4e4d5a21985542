"""One of two runs that start together: `python port_worker.py FOLDER NUMBER`. Run by test_vllm_start.py."""

import os
import sys
import time
from pathlib import Path

import torch
from trl.trainer.utils import ensure_master_addr_port

from epo_trl.models.vllm import own_port


def main(folder: str, number: str) -> None:
    """Joins a process group of its own, as a vLLM in the process does, once both runs have chosen their ports."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    with own_port():
        ensure_master_addr_port()  # as TRL does before it starts vLLM
        _meet(Path(folder), "chosen", number)
        torch.distributed.init_process_group("gloo")
    _meet(Path(folder), "joined", number)
    torch.distributed.destroy_process_group()


def _meet(folder: Path, what: str, number: str) -> None:
    (folder / f"{what} {number}").touch()
    end = time.monotonic() + 20  # the other one may have failed
    while len(list(folder.glob(f"{what} *"))) < 2 and time.monotonic() < end:
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
