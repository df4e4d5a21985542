"""Checks the accelerators that torch can use, free disk space, and the Hub."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from epo_trl.doctor.finding import Finding, State, pip_install
from epo_trl.doctor.imports import Imported

PART = "machine"
GB = 1e9
LEAST_GB = 3.5  # the weights of a 1.5B model in bfloat16 take 3.1 GB
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def gpu_finding(torch: Imported) -> Finding:
    """Checks which accelerators torch can use. Without one, the tiny models train on the CPU."""
    if torch.error:
        return Finding(PART, "GPU", State.MISSING, "unknown: torch cannot be imported")
    facts = torch.facts
    if facts["gpus"]:
        count = Counter((name, memory) for name, memory in facts["gpus"])
        seen = "; ".join(f"{n} x {name}" + (f", {m / GB:.0f} GB each" if m else "") for (name, m), n in count.items())
        bf16 = "" if facts["kind"] != "cuda" else "; bf16" if facts["bf16"] else "; no bf16, so set bf16: false"
        return Finding(PART, "GPU", State.OK, seen + bf16)
    if facts["error"]:
        message = f"torch is built for {facts['built_for']} and cannot use a GPU: {facts['error']}"
        is_broken = has_nvidia()
        return Finding(PART, "GPU", State.BROKEN if is_broken else State.MISSING, message, "nvidia-smi" * is_broken)
    if facts["built_for"] == "CPU" and has_nvidia():
        message = "there is an NVIDIA GPU, but this torch is built for the CPU"
        return Finding(PART, "GPU", State.BROKEN, message, pip_install("torch", "--force-reinstall"))
    return Finding(PART, "GPU", State.MISSING, "none: the configs named tiny_cpu run here, the others need one")


def has_nvidia() -> bool:
    """Whether the machine has an NVIDIA GPU with a driver, even if torch cannot use it."""
    return NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi") is not None


def disk_findings(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Checks free space in the current folder, which runs write to, and in the Hub's cache, which holds the models."""
    return [disk_finding("current folder", Path.cwd()), disk_finding("Hub cache", hub_cache(environ))]


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Returns the download cache of the Hub's client, by its documented environment variables."""
    if given := environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(home).expanduser() / "hub"


def disk_finding(name: str, folder: Path) -> Finding:
    """Checks the free space of a folder, and whether it is writable."""
    existing = next(place for place in [folder.absolute(), *folder.absolute().parents] if place.is_dir())
    usage = shutil.disk_usage(existing)
    message = f"{usage.free / GB:.0f} GB of {usage.total / GB:.0f} GB free in {folder}"
    if not os.access(existing, os.W_OK | os.X_OK):
        fix = "export HF_HOME=FOLDER" if name == "Hub cache" else "cd FOLDER"
        return Finding(PART, name, State.BROKEN, f"{message}, which is not writable", fix)
    if usage.free < LEAST_GB * GB:
        fix = "hf cache prune" if name == "Hub cache" else f"du -sh {folder}/* | sort -h"
        return Finding(PART, name, State.BROKEN, f"{message}: too little for a model with 1.5B parameters", fix)
    return Finding(PART, name, State.OK, message)


def hub_finding(online: bool, environ: Mapping[str, str] = os.environ) -> Finding:
    """Checks whether the Hub can be reached.

    Args:
        online: Whether to contact it. Otherwise nothing leaves the machine.
        environ: Environment variables, of which `HF_HUB_OFFLINE` is read.
    """
    if not online:
        return Finding(PART, "Hub", State.NOT_ASKED, "checked by epo-trl doctor --online", "")
    if environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        message = f"HF_HUB_OFFLINE={environ['HF_HUB_OFFLINE']}: only cached models can be used"
        return Finding(PART, "Hub", State.MISSING, message, "unset HF_HUB_OFFLINE")
    try:
        from huggingface_hub import HfApi

        HfApi().model_info("Qwen/Qwen2.5-1.5B-Instruct", timeout=10)
    except Exception as error:  # network, certificates, proxies, or the client itself
        fix = "export HF_HUB_OFFLINE=1   # and pass models as folders"
        return Finding(PART, "Hub", State.BROKEN, f"does not answer: {type(error).__name__}: {error}", fix)
    return Finding(PART, "Hub", State.OK, "answers")
