"""What this machine has. Every probe is guarded: a broken part is a finding, never a crash."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from typing import Any

from crossdock.bench.report import cpu_name

PACKAGES = (
    "crossdock", "torch", "triton", "numpy", "safetensors", "transformers", "fastapi", "uvicorn",
)  # fmt: skip
TOTAL_STORE_ORDER = ("x86_64", "AMD64")
SERVER_PACKAGES = ("fastapi", "uvicorn", "transformers")


def examine() -> dict[str, Any]:
    """Everything `check` shows; sizes in bytes."""
    problems: list[str] = []
    packages = {name: _version(name) for name in PACKAGES}
    torch = _import_torch(problems)
    devices = _guarded(lambda: _devices(torch), [], "GPUs", problems)
    found = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": packages,
        "nccl": _guarded(lambda: _nccl(torch), None, "NCCL", problems),
        "cpu": _cpu(),
        "shared_memory": _shared_memory(),
        "devices": devices,
        "links": _guarded(lambda: _links(torch, len(devices)), [], "links", problems),
    }
    problems += _mismatches(found, torch)
    return {**found, "capabilities": _capabilities(found, torch), "problems": problems}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _import_torch(problems: list[str]) -> Any:
    try:
        import torch
    except (ImportError, OSError) as error:
        problems.append(f"torch cannot be imported: {error}")
        return None
    return torch


def _guarded(probe: Callable[[], Any], otherwise: Any, what: str, problems: list[str]) -> Any:
    try:
        return probe()
    except Exception as error:
        problems.append(f"{what}: {type(error).__name__}: {error}")
        return otherwise


def _nccl(torch: Any) -> str | None:
    if torch is None or not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _cpu() -> dict[str, Any]:
    ordered = platform.machine() in TOTAL_STORE_ORDER
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "name": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_order": "total store order" if ordered else "weak memory order",
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * page,
        "free_bytes": _available_memory() or os.sysconf("SC_AVPHYS_PAGES") * page,
    }


def _available_memory() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _shared_memory() -> dict[str, Any]:
    return {
        "memfd": hasattr(os, "memfd_create") and _memfd_works(),
        "dev_shm_free_bytes": shutil.disk_usage("/dev/shm").free
        if os.path.isdir("/dev/shm")
        else 0,
    }


def _memfd_works() -> bool:
    try:
        fd = os.memfd_create("crossdock-check")
        os.ftruncate(fd, 4096)
        os.close(fd)
    except OSError:
        return False
    return True


def _devices(torch: Any) -> list[dict[str, Any]]:
    if torch is None or not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": total,
                "free_bytes": free,
            }
        )
    return found


def _links(torch: Any, count: int) -> list[dict[str, Any]]:
    names = _topology() if count > 1 else {}
    return [
        {
            "a": a,
            "b": b,
            "link": names.get((a, b)),
            "peer_access": bool(torch.cuda.can_device_access_peer(a, b)),
        }
        for a, b in combinations(range(count), 2)
    ]


def _topology() -> dict[tuple[int, int], str]:
    """Links by pair as nvidia-smi calls them: NV18, PIX, NODE, SYS ...; empty without it.

    With CUDA_VISIBLE_DEVICES set, torch's numbers are not nvidia-smi's: nothing is told then.
    """
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES"):
        return {}
    done = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False
    )
    return parse_topology(done.stdout)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The upper triangle of `nvidia-smi topo -m`."""
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    count = len(rows)
    return {
        (a, b): rows[a][1 + b] for a, b in combinations(range(count), 2) if len(rows[a]) > 1 + b
    }


def _mismatches(found: dict[str, Any], torch: Any) -> list[str]:
    problems = []
    missing = [name for name in ("torch", "numpy", "safetensors") if not found["packages"][name]]
    if missing:
        problems.append(f"not installed: {', '.join(missing)}")
    if torch is not None and shutil.which("nvidia-smi") and not found["devices"]:
        problems.append(
            f"there is an NVIDIA driver, but torch {torch.__version__} finds no GPU: "
            "install a CUDA build of torch, or look at CUDA_VISIBLE_DEVICES"
        )
    return problems


def _capabilities(found: dict[str, Any], torch: Any) -> list[dict[str, Any]]:
    cores, gpus = found["cpu"]["cores"], len(found["devices"])
    ordered = found["cpu"]["memory_order"] == "total store order"
    engine = "torch is missing" if torch is None else None
    shm = engine or (
        (None if ordered else f"{platform.machine()} has no total store order")
        or (None if found["shared_memory"]["memfd"] else "memfd_create does not work here")
    )
    gloo = engine or (
        None if torch.distributed.is_available() and torch.distributed.is_gloo_available()
        else "this torch has no gloo"
    )  # fmt: skip
    one_gpu = engine or (None if gpus else "no GPU")
    many_gpus = one_gpu or (
        (None if gpus > 1 else "one GPU") or (None if found["nccl"] else "this torch has no NCCL")
    )
    http = [name for name in SERVER_PACKAGES if not found["packages"][name]]
    pairs = len(found["links"])
    peers = sum(link["peer_access"] for link in found["links"])
    return [
        _capability("one CPU rank", engine, f"{cores} cores"),
        _capability("CPU ranks through shm", shm, f"memfd, {found['cpu']['memory_order']}"),
        _capability("CPU ranks through collective", gloo, "gloo"),
        _capability("invariant mode on CPU ranks", engine, "one thread a rank"),
        _capability("one GPU", one_gpu, f"{gpus} here"),
        _capability(
            "GPU ranks through collective", many_gpus,
            f"NCCL {found['nccl']}, {gpus} GPUs, {peers} of {pairs} pairs read each other",
        ),
        _capability("the server", f"not installed: {', '.join(http)}" if http else engine,
                    "fastapi, uvicorn"),
    ]  # fmt: skip


def _capability(name: str, obstacle: str | None, works_with: str) -> dict[str, Any]:
    return {"name": name, "works": obstacle is None, "reason": obstacle or works_with}
