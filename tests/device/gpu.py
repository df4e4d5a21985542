"""The GPUs of this machine; to be imported before the stand-in for one is installed."""

import os

import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; for deterministic products

COUNT = torch.cuda.device_count() if torch.version.cuda else 0


def compute_in_float32() -> None:
    """Rules out TF32, which rounds the factors of float32 products to 11 bits."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
