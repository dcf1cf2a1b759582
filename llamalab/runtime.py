"""Device, dtype, threads, memory, versions: what a run stands on."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from llamalab.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(name: str | None = None) -> torch.device:
    """The device of that name, or the best there is: cuda, mps, else cpu.

    Raises:
        UserError: the name is unknown, or that device is not on this machine.
    """
    if name is None or name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].removesuffix(f": {name}")
        reason = "expected cpu, cuda, cuda:N or mps" if reason.startswith("Expected one of") else reason  # torch names 20 more
        raise UserError(f"device {name!r} cannot be used here: {reason}") from None
    return device


def pick_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of a name such as bfloat16 or bf16; None stays None."""
    if name is None or isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def set_threads(n: int | None = None) -> int:
    """Use n CPU threads, or as many as this process may run on; returns the number in use."""
    if n is None and "OMP_NUM_THREADS" not in os.environ:
        n = len(os.sched_getaffinity(0))
    if n is not None:
        torch.set_num_threads(n)
    return torch.get_num_threads()


def reuse_freed_memory() -> None:
    """Let glibc keep large freed blocks for the next step instead of returning them to the kernel.

    By default each step's activations are unmapped and mapped again, a page fault every 4 KB: about 15 % of
    a SmolLM2 training step on 2 cores. Elsewhere than on glibc nothing is changed.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**30)


def reset_peak_memory(device: torch.device) -> None:
    """Start the peak of `peak_memory` anew (on Linux CPUs through /proc, where the kernel allows it)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak then counts from the start of the process, which is what it is called there


def peak_memory(device: torch.device) -> int:
    """Most bytes held since the start or `reset_peak_memory`: allocated on CUDA, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _proc_status("VmHWM")


def resident_memory() -> int:
    """Bytes of main memory this process holds now."""
    return _proc_status("VmRSS")


def _proc_status(field: str) -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    import resource

    scale = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss is bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def versions() -> dict[str, str]:
    """Versions of what a result depends on, for recipe.json and bench tables."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "threads": str(torch.get_num_threads())}
    for package in ("llamalab", "torch", "torchao", "transformers", "tokenizers", "safetensors", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_device_name()
    return found


def git_commit(where: Path | None = None) -> str | None:
    """Commit of the checkout the package runs from, '+' where it has changes; None outside one."""
    here = str(where or Path(__file__).resolve().parent)
    try:
        commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if commit.returncode:
            return None
        changed = subprocess.run(["git", "-C", here, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")
