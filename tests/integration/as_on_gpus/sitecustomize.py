"""Let vLLM believe that it runs on eight H100s; Python imports this at its start from PYTHONPATH.

Compiled modules are empty and NVML answers as below: enough for vLLM to check arguments, choose its
model runner and resolve its config, which is all Python. Nothing can be computed.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace

GIB = 1024**3
NVML = {
    "NVMLError": type("NVMLError", (Exception,), {}),
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 8,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
    "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
        total=80 * GIB, free=79 * GIB, used=GIB
    ),
    "nvmlDeviceGetP2PStatus": lambda *_: 0,
    "NVML_P2P_CAPS_INDEX_NVLINK": 0,
    "NVML_P2P_STATUS_OK": 0,
}
COMPILED = "_C _moe_C _C_stable_libtorch _moe_C_stable_libtorch cumem_allocator"
FLASH_ATTENTION = "_vllm_fa2_C _vllm_fa3_C"
EMPTY = [f"vllm.{name}" for name in COMPILED.split()]
EMPTY += [f"vllm.vllm_flash_attn.{name}" for name in FLASH_ATTENTION.split()]
CONTENTS: dict[str, dict[str, object]] = {name: {} for name in EMPTY} | {
    "vllm.third_party.pynvml": NVML,
    "vllm.device_allocator.cumem": {"cumem_available": True},
}


ASKED_AT_IMPORT = "cutlass_scaled_mm_supports_fp8 cutlass_scaled_mm_supports_block_fp8"
"""Operators that modules of vLLM's ask for what they support."""


class Stub(Loader):
    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(CONTENTS[module.__name__])
        if module.__name__ in EMPTY:
            import torch

            for name in ASKED_AT_IMPORT.split():
                setattr(torch.ops._C, name, lambda *_: False)


class Platforms(Loader):
    """vLLM's module, which shall not look at the name of its own build."""

    def __init__(self, whole: Loader) -> None:
        self._whole = whole

    def exec_module(self, module: ModuleType) -> None:
        self._whole.exec_module(module)
        vars(module)["vllm_version_matches_substr"] = lambda _: False


class Finder(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname in CONTENTS:
            return ModuleSpec(fullname, Stub())
        if fullname == "vllm.platforms":
            spec = PathFinder.find_spec(fullname, path)
            assert spec is not None
            assert spec.loader is not None
            spec.loader = Platforms(spec.loader)
            return spec
        return None


sys.meta_path.insert(0, Finder())
