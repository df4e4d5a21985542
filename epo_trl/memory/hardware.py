"""GPUs that a plan can refer to by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Hardware:
    """The data-sheet numbers of one GPU.

    Args:
        name: Name of the GPU, shown in messages.
        gpu_gb: GPU memory, in 10^9 bytes.
        tflops: Peak of dense matrix products in bf16, 10^12 operations per second.
        bandwidth_gb_s: Memory bandwidth, in 10^9 bytes per second.
    """

    name: str
    gpu_gb: float
    tflops: float
    bandwidth_gb_s: float

    def __post_init__(self) -> None:
        for name in ("gpu_gb", "tflops", "bandwidth_gb_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a number > 0, got {getattr(self, name)}")


# NVIDIA's data sheets; A100, H100, H200 and B200 as SXM modules.
GPUS = {
    one.name: one
    for one in (
        Hardware("A100-40GB", 40, 312, 1555),
        Hardware("A100", 80, 312, 2039),
        Hardware("H100", 80, 989, 3350),
        Hardware("H200", 141, 989, 4800),
        Hardware("B200", 180, 2250, 7700),
        Hardware("L4", 24, 121, 300),
        Hardware("L40S", 48, 362, 864),
        Hardware("RTX4090", 24, 165, 1008),
    )
}


def find_hardware(
    name: str | None, gpu_gb: float | None = None, tflops: float | None = None, bandwidth_gb_s: float | None = None
) -> Hardware:
    """Returns the named GPU; arguments that are given override its data sheet.

    Args:
        name: A key of `GPUS`; `None` for any other GPU, which requires all three numbers.
        gpu_gb: See `Hardware`.
        tflops: See `Hardware`.
        bandwidth_gb_s: See `Hardware`.

    Raises:
        ValueError: If the name is unknown, or a number is missing or not positive.
    """
    given = {"gpu_gb": gpu_gb, "tflops": tflops, "bandwidth_gb_s": bandwidth_gb_s}
    numbers: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if name is None:
        missing = [field for field in given if field not in numbers]
        if missing:
            raise ValueError(
                f"gpu: expected one of {', '.join(GPUS)}, or all of {', '.join(given)}; got no gpu and no "
                f"{', '.join(missing)}"
            )
        return Hardware("GPU", **numbers)
    known = {one.casefold(): hardware for one, hardware in GPUS.items()}
    if name.casefold() not in known:
        raise ValueError(
            f"gpu: expected one of {', '.join(GPUS)}, got {name!r}; for another GPU, omit the name and "
            f"give {', '.join(given)}"
        )
    return replace(known[name.casefold()], **numbers)
