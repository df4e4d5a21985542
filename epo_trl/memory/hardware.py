"""The GPUs that a plan knows by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Hardware:
    """One GPU, by its data sheet.

    Args:
        name: For messages.
        gpu_gb: In units of 10^9 bytes.
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


def hardware_of(
    name: str | None, gpu_gb: float | None = None, tflops: float | None = None, bandwidth_gb_s: float | None = None
) -> Hardware:
    """Returns the GPU of that name, with what is given in place of what its data sheet says.

    Args:
        name: A key of `GPUS`; `None` for another one, of which all three numbers have to be given.
        gpu_gb: See `Hardware`.
        tflops: See `Hardware`.
        bandwidth_gb_s: See `Hardware`.

    Raises:
        ValueError: If the name is unknown, or a number is missing or not above 0.
    """
    given = {"gpu_gb": gpu_gb, "tflops": tflops, "bandwidth_gb_s": bandwidth_gb_s}
    numbers: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if name is None:
        missing = [field for field in given if field not in numbers]
        if missing:
            raise ValueError(
                f"gpu: got nothing, and no {', '.join(missing)}; expected one of {', '.join(GPUS)}, or all three of "
                f"{', '.join(given)}"
            )
        return Hardware("GPU", **numbers)
    known = {one.casefold(): hardware for one, hardware in GPUS.items()}
    if name.casefold() not in known:
        raise ValueError(f"gpu: expected one of {', '.join(GPUS)}, or none and its numbers, got {name!r}")
    return replace(known[name.casefold()], **numbers)
