"""A stand-in for a CUDA device, for machines without one: `install()` before anything else asks torch for a device.

Tensors of device type `cuda` lie in host memory: CUDA's own dispatch key, autocast lists, random state and DDP's
reducer, the CPU's kernels. It raises where CUDA would: a CPU tensor among device tensors, device indices into a CPU
tensor, a generator or random state of the CPU, a CPU tensor in a collective of "nccl". `synchronisations()` lists what
made the host wait for the device.

It cannot show numerics, races, memory, the kernels of a GPU, or the order of NCCL's calls.

It replaces parts of torch that change with every release, so it takes one release only.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import include_paths, library_paths

TORCH = "2.13"
SOURCE = Path(__file__).with_name("stand_in.cpp")
BUILD = Path(__file__).parents[2] / "build" / "device"
GIB = 2**30


class Unavailable(Exception):
    """Why there can be no stand-in here."""


class Synchronisation(NamedTuple):
    """One wait of the host for the device.

    Args:
        kind: `item`, `D2H` and `H2D` (copies to and from the host), `synchronize`, or the operator.
        detail: Shape and dtype.
        stack: `(file, line, function)` of each Python frame, the innermost first; none in a backward pass.
    """

    kind: str
    detail: str
    stack: tuple[tuple[str, int, str], ...]


_LIBRARY: ModuleType | None = None
_KEPT: list[Any] = []  # what torch forgets when it is collected


def install(devices: int = 1) -> None:
    """Lets torch believe in so many CUDA devices.

    Raises:
        Unavailable: Another release of torch, one that has CUDA, or no compiler.
    """
    global _LIBRARY
    if _LIBRARY is not None:
        return
    if not torch.__version__.startswith(f"{TORCH}.") or torch.version.cuda:
        raise Unavailable(f"torch: expected {TORCH} for the CPU, got {torch.__version__}; the stand-in device replaces "
                          f"parts of torch that change with every release: pip install 'torch=={TORCH}.*'")  # fmt: skip
    _LIBRARY = _load(_built())
    _LIBRARY.setup(devices)
    _replace_torch_cuda(_LIBRARY, devices)
    _load_files_to_the_device()
    _replace_nccl(_LIBRARY)
    _KEPT.append(_products_of_another_type())


@contextlib.contextmanager
def synchronisations() -> Iterator[list[Synchronisation]]:
    """Yields the list of what makes the host wait, which grows meanwhile."""
    seen: list[Synchronisation] = []

    def note(kind: str, detail: str) -> None:
        frame, stack = sys._getframe(1) if sys._getframe().f_back else None, []
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        seen.append(Synchronisation(kind, detail, tuple(stack)))

    assert _LIBRARY is not None
    _LIBRARY.report_to(note)
    try:
        yield seen
    finally:
        _LIBRARY.report_to(None)


# ---------------------------------------------------------------------------------------------------------- the library


def _built() -> Path:
    """Returns the library for this source, torch and Python, built if it is not there: a minute."""
    version = f"{torch.__version__} {sys.version}".encode()
    library = BUILD / f"stand_in_{hashlib.sha256(SOURCE.read_bytes() + version).hexdigest()[:12]}.so"
    if library.exists():
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(".tmp")
    words = ["c++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-DUSE_C10D", "-DUSE_DISTRIBUTED"]
    words += ["-DTORCH_EXTENSION_NAME=stand_in", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    words += [f"-I{folder}" for folder in (*include_paths(), sysconfig.get_paths()["include"])]
    words += [str(SOURCE), *(f"-L{folder}" for folder in library_paths())]
    words += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-o", str(unfinished)]
    print(f"building {library}: a minute", file=sys.stderr, flush=True)
    try:
        subprocess.run(words, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"c++: {error}; the stand-in device needs a C++ compiler and Python's headers, on Debian "
                          "apt install g++ python3-dev") from error  # fmt: skip
    unfinished.rename(library)
    return library


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("stand_in", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------------------------- torch.cuda


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream(contextlib.nullcontext):
    """The one stream that there is."""

    device_index = cuda_stream = stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(self)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True


def _replace_torch_cuda(library: ModuleType, devices: int) -> None:
    """Replaces what asks CUDA's runtime; the rest of `torch.cuda` is as it was."""

    def index(device: Any = None) -> int:
        device = device if isinstance(device, int) or device is None else torch.device(device).index
        return library.current_device() if device is None or device < 0 else device

    class Device:
        """`with torch.cuda.device(...)`."""

        def __init__(self, device: Any) -> None:
            self.index = index(device)

        def __enter__(self) -> None:
            self.before = library.current_device()
            library.set_device(self.index)

        def __exit__(self, *error: Any) -> None:
            library.set_device(self.before)

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    properties = SimpleNamespace(
        name="stand-in", major=9, minor=0, total_memory=2 * GIB, multi_processor_count=132, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, L2_cache_size=50 << 20,
    )  # fmt: skip
    replaced = {
        "default_generators": tuple(library.default_generator(i) for i in range(devices)),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: devices,
        "current_device": library.current_device,
        "set_device": lambda device: library.set_device(index(device)),
        "device": Device,
        "init": nothing, "_lazy_init": nothing, "_lazy_call": lambda call, **kwargs: call(),
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "Event": _Event, "Stream": _Stream, "current_stream": _Stream, "default_stream": _Stream,
        "stream": contextlib.nullcontext, "set_stream": nothing,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_arch_list": lambda: ["sm_90"],
        "get_sync_debug_mode": zero,
        "mem_get_info": lambda device=None: (GIB // 4, properties.total_memory),
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "empty_cache": nothing, "ipc_collect": nothing, "reset_peak_memory_stats": nothing,
        **{f"{most}memory_{what}": zero for most in ("", "max_") for what in ("allocated", "reserved")},
    }  # fmt: skip
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        for name, value in replaced.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch._C._cuda_getCurrentRawStream = zero
    torch._C._cuda_getCurrentStream = lambda device: (0, 0, 1)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.version.cuda = "12.8"


def _load_files_to_the_device() -> None:
    """`torch.load` of what was saved on the device."""

    def copied(storage: torch.UntypedStorage, source: torch.device | str, device: torch.device | str) -> Any:
        fresh = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        fresh.copy_(torch.empty(0, dtype=torch.uint8, device=source).set_(storage))
        return fresh.untyped_storage()

    def loaded(storage: torch.UntypedStorage, location: str) -> Any:
        return copied(storage, "cpu", location) if location.startswith("cuda") else None

    clone = torch.UntypedStorage.clone
    torch.UntypedStorage.clone = lambda self: (
        clone(self) if self.device.type == "cpu" else copied(self, self.device, self.device)
    )
    torch.serialization.register_package(1, lambda storage: None, loaded)


def _replace_nccl(library: ModuleType) -> None:
    """A group of "nccl", or of no name, is gloo behind a backend that refuses tensors of the CPU."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return library.collectives(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)

    dist.Backend.register_backend("stand_in", make, devices=["cuda"])
    init, new = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> Any:
        return init("stand_in" if backend in (None, "nccl") else backend, *args, **kwargs)

    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
        return new(ranks, timeout, "stand_in" if backend == "nccl" else backend, **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_group


def _products_of_another_type() -> Any:
    """Returns the registration of matrix products with an output type of their own, which the CPU has not."""

    def mm(a: Any, b: Any, dtype: Any) -> Any:
        return a.to(dtype) @ b.to(dtype)

    def addmm(c: Any, a: Any, b: Any, dtype: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        return beta * c.to(dtype) + alpha * mm(a, b, dtype)

    operators = torch.library.Library("aten", "IMPL")
    for name, function in (("mm", mm), ("addmm", addmm)):
        operators.impl(f"{name}.dtype", function, "CUDA")
        operators.impl(f"{name}.dtype_out", lambda *a, out, f=function, **k: out.copy_(f(*a, **k)), "CUDA")
    return operators
