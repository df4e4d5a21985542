"""Checks the accelerators that torch can use, free disk space, and the Hub."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from epo_trl.lab.doctor.finding import Finding, State, pip_install
from epo_trl.lab.doctor.packages import import_error

PART = "machine"
GB = 1e9
LEAST_GB = 3.5  # the weights of a 1.5B model in bfloat16 take 3.1 GB
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def gpu_finding() -> Finding:
    """Checks which accelerators torch can use. Without one, the tiny models train on the CPU."""
    found = partial(Finding, PART, "GPU")
    if import_error("torch"):
        return found(State.MISSING, "unknown: torch cannot be imported")
    torch = import_module("torch")
    if torch.cuda.is_available():
        return found(State.OK, describe_gpus(torch.cuda))
    if torch.accelerator.is_available():
        kind, count = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
        return found(State.OK, f"{count} x {kind}")
    has_nvidia = NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi") is not None
    if built_for := torch.version.cuda or torch.version.hip:
        message = f"torch is built for {'CUDA' if torch.version.cuda else 'ROCm'} {built_for} and cannot use a GPU"
        try:
            torch.cuda.init()
        except Exception as error:
            message += f": {error}"
        return found(State.BROKEN if has_nvidia else State.MISSING, message, "nvidia-smi" * has_nvidia)
    if has_nvidia:
        message = "there is an NVIDIA GPU, but this torch is built for the CPU"
        return found(State.BROKEN, message, pip_install("torch", "--force-reinstall"))
    return found(State.MISSING, "none: the configs named tiny_cpu run here, the others need one")


def describe_gpus(cuda: Any) -> str:
    """Returns count, name and memory of the GPUs, and whether they support bf16."""
    devices = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
    counts = Counter(f"{device.name}, {device.total_memory / GB:.0f} GB each" for device in devices)
    bf16 = "bf16" if cuda.is_bf16_supported() else "no bf16, so set bf16: false"
    return "; ".join([*(f"{count} x {gpu}" for gpu, count in counts.items()), bf16])


def disk_findings() -> list[Finding]:
    """Checks free space in the current folder, which runs write to, and in the Hub's cache, which holds the models."""
    here = disk_finding("current folder", Path.cwd(), "cd FOLDER", "du -sh ./* | sort -h")
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return [here]
    return [here, disk_finding("Hub cache", Path(HF_HUB_CACHE), "export HF_HOME=FOLDER", "hf cache prune")]


def disk_finding(name: str, folder: Path, if_read_only: str, if_full: str) -> Finding:
    """Checks the free space of a folder, and whether it is writable. The last two arguments are fixes."""
    existing = next(place for place in [folder.absolute(), *folder.absolute().parents] if place.is_dir())
    found, usage = partial(Finding, PART, name), shutil.disk_usage(existing)
    message = f"{usage.free / GB:.0f} GB of {usage.total / GB:.0f} GB free in {folder}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return found(State.BROKEN, f"{message}, which is not writable", if_read_only)
    if usage.free < LEAST_GB * GB:
        return found(State.BROKEN, f"{message}: too little for a model with 1.5B parameters", if_full)
    return found(State.OK, message)


def hub_finding() -> Finding:
    """Contacts the Hub."""
    found = partial(Finding, PART, "Hub")
    try:
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            return found(State.MISSING, "HF_HUB_OFFLINE is set: only cached models can be used", "unset HF_HUB_OFFLINE")
        HfApi().model_info("Qwen/Qwen2.5-1.5B-Instruct", timeout=10)
    except Exception as error:  # network, certificates, proxies, or the client itself
        fix = "export HF_HUB_OFFLINE=1   # and pass models as folders"
        return found(State.BROKEN, f"does not answer: {type(error).__name__}: {error}", fix)
    return found(State.OK, "answers")
