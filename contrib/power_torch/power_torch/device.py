"""Which device and element type a model runs in; an accelerator is an option, never an assumption."""

from __future__ import annotations

import hashlib
import os
import platform

import torch

from power_core.errors import ConfigError
from power_core.host import processor
from power_torch.config import Precision

__all__ = ["compute_dtype", "find_device", "hardware", "kernels_digest", "multiplies_bf16"]

# Variables by which torch's libraries are told to use other kernels.
_SWITCHES = ("ATEN_", "CUBLAS_", "DNNL_", "MKL_", "NVIDIA_TF32_OVERRIDE", "ONEDNN_", "TORCH_ALLOW_TF32")


def find_device(name: str) -> torch.device:
    """
    The device called *name*.

    Raises:
        ConfigError: It is not there.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r} was asked for and this torch sees no CUDA device",
            plugin="torch",
            where="device",
            got=name,
            expected="cpu",
            fix="install a CUDA build of torch, or set device = 'cpu'",
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(
            f"device {name!r} was asked for",
            plugin="torch",
            where="device",
            got=name,
            expected=f"cuda:0 to {count - 1}",
        )
    return device


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The element type of matrices: with `auto` bf16 where *device* multiplies it natively."""
    if precision is Precision.AUTO:
        return torch.bfloat16 if multiplies_bf16(device) else torch.float32
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32


def multiplies_bf16(device: torch.device) -> bool:
    """Whether *device* has instructions for bf16 products; elsewhere they are emulated, slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # torch's own answer counts emulation as support
    return _cpu_has_bf16()


def hardware(device: torch.device) -> str:
    """What decides the choice of kernels."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def kernels_digest(device: torch.device) -> str:
    """Of everything but threads and sizes that can change a kernel: build, processor, device, switches."""
    facts = [
        torch.__config__.show(),
        processor(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        sorted((name, value) for name, value in os.environ.items() if name.startswith(_SWITCHES)),
    ]
    if device.type == "cuda":
        facts += [torch.version.cuda, torch.cuda.get_device_capability(device)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _cpu_has_bf16() -> bool:
    """Whether the processor has AVX512-BF16 or AMX; torch asks this of itself under private names."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)
