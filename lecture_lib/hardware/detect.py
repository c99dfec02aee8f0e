"""What is in this machine: processors with their caches, GPUs with the links between them. Asks, does not measure."""

import html
import math
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# One of these exists where a driver for GPUs is loaded: NVIDIA, AMD, Windows' GPU inside WSL2. Without them there is
# nothing to ask, and no reason to spend a second on importing torch.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True)
class Cache:
    """A data cache: its level from 1, its bytes, and how many logical cores share one."""

    level: int
    nbytes: int
    shared_by: int


@dataclass(frozen=True)
class Gpu:
    """A GPU as CUDA describes it. ``memory_bytes`` is what programs can use, less than the datasheet says."""

    index: int
    name: str
    sms: int
    l2_bytes: int
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """What ``detect`` found. ``cores`` is how many this process may use; ``links[i][j]`` how GPU i reaches GPU j, in
    the words of ``nvidia-smi topo -m``, empty where that is not known."""

    cpu: str
    cores: int
    memory_bytes: int
    caches: tuple[Cache, ...]
    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()

    def rows(self) -> list[tuple[str, str]]:
        """The table, as pairs of what and how much."""
        rows = [("cores for this process", str(self.cores))]
        rows += [
            (f"L{cache.level} cache", f"{size(cache.nbytes)}{_sharing(cache.shared_by, self.cores)}")
            for cache in self.caches
        ]
        rows += [("memory", size(self.memory_bytes))]
        rows += [
            (
                f"GPU {gpu.index}",
                f"{gpu.name}: {gpu.sms} SMs, L2 {size(gpu.l2_bytes)}, HBM {size(gpu.memory_bytes)}, "
                f"compute capability {gpu.capability}",
            )
            for gpu in self.gpus
        ]
        rows += [
            (f"links of GPU {gpu.index}", "  ".join(f"{link:<4}" for link in row).rstrip())
            for gpu, row in zip(self.gpus, self.links)
            if len(self.gpus) > 1
        ]
        return rows

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} GPU{'s' * (len(self.gpus) != 1)}" if self.gpus else "no GPU"
        lines = [f"this machine: {self.cpu}, {gpus}"]
        return "\n".join(lines + [f"  {what:<24}{value}" for what, value in self.rows()])

    def _repr_html_(self) -> str:
        rows = [("processor", self.cpu), *self.rows()]
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(what)}</th>"
            f"<td style='text-align:left;white-space:pre'>{html.escape(value)}</td></tr>"
            for what, value in rows
        )
        return f"<table><caption>this machine</caption>{cells}</table>"


def size(nbytes: int) -> str:
    """32 KiB, 1.25 MiB, 24 GiB: bytes as caches and memories are counted, to three digits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 1000 * scale else f"{nbytes / scale:.0f} {unit}"
    return f"{nbytes} bytes"


def _sharing(shared_by: int, cores: int) -> str:
    if shared_by <= 1:
        return " for each core"
    return " for all cores" if shared_by >= cores else f" for each {shared_by} logical cores"


def detect() -> Machine:
    """Ask the operating system, CUDA and NVML what this machine has. Takes milliseconds where there is no GPU."""
    cpu, caches = _macos(_sysctl) if sys.platform == "darwin" else _linux()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus, links = _gpus() if any(os.path.exists(driver) for driver in DRIVERS) else ((), ())
    return Machine(cpu, _cores(), memory, caches, gpus, links)


# ---- processors ------------------------------------------------------------------------------------------------------


def _cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: those it is allowed to run on, and no more than a container grants."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        granted, period = quota.read_text().split()
        return min(cores, math.ceil(int(granted) / int(period)))
    except (OSError, ValueError):  # no container, or one that says "max"
        return cores


def _linux(root: Path = Path("/")) -> tuple[str, tuple[Cache, ...]]:
    """(model, caches) of the first core that this process may use."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        text = ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    caches = []
    for index in sorted((root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*")):
        try:
            level, kind, text, shared = (
                (index / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
        except OSError:  # some virtual machines leave files out
            continue
        if kind != "Instruction":
            caches.append(Cache(int(level), _kernel_size(text), _count(shared)))
    return model, tuple(caches) or _c_library_caches()


def _kernel_size(text: str) -> int:
    """ "32K" as the kernel writes it, in bytes."""
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:])
    return int(text[:-1]) * scale if scale else int(text)


def _count(cores: str) -> int:
    """How many cores "0-3,8" names."""
    ranges = [part.split("-") for part in cores.split(",") if part]
    return sum(int(r[-1]) - int(r[0]) + 1 for r in ranges)


def _c_library_caches() -> tuple[Cache, ...]:
    """What the C library knows, where the kernel shows nothing."""
    names = {1: "SC_LEVEL1_DCACHE_SIZE", 2: "SC_LEVEL2_CACHE_SIZE", 3: "SC_LEVEL3_CACHE_SIZE"}
    sizes = {level: os.sysconf(name) for level, name in names.items() if name in os.sysconf_names}
    return tuple(Cache(level, nbytes, 1) for level, nbytes in sizes.items() if nbytes > 0)


def _macos(sysctl) -> tuple[str, tuple[Cache, ...]]:
    """(model, caches). ``sysctl(name)`` returns the text, "" for a name that this Mac lacks. perflevel0 is the fast
    kind of core on Apple's chips; Macs with Intel chips have one kind and the plain names."""
    model = sysctl("machdep.cpu.brand_string") or platform.machine()
    names = {
        1: ("hw.perflevel0.l1dcachesize", "hw.l1dcachesize"),
        2: ("hw.perflevel0.l2cachesize", "hw.l2cachesize"),
        3: ("hw.l3cachesize",),
    }
    found = {level: next(filter(None, map(sysctl, choices)), "") for level, choices in names.items()}
    shared = {1: 1, 2: int(sysctl("hw.perflevel0.cpusperl2") or 1), 3: int(sysctl("hw.logicalcpu") or 1)}
    return model, tuple(Cache(level, int(text), shared[level]) for level, text in found.items() if int(text or 0))


def _sysctl(name: str) -> str:
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True).stdout.strip()


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def _gpus() -> tuple[tuple[Gpu, ...], tuple[tuple[str, ...], ...]]:
    import torch

    if not torch.cuda.is_available():
        return (), ()
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = tuple(describe(i, p) for i, p in enumerate(properties))
    if torch.version.cuda is None:  # AMD: NVML does not know these
        return gpus, ()
    try:
        import pynvml
    except ImportError:  # there is none for this system
        return gpus, ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return gpus, ()
    try:
        # By name, not by number: CUDA_VISIBLE_DEVICES hides and reorders what CUDA counts, NVML counts all.
        handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{p.uuid}") for p in properties]
        return gpus, links_between(handles, pynvml)
    except pynvml.NVMLError:  # a slice of a GPU (MIG) has no links of its own
        return gpus, ()
    finally:
        pynvml.nvmlShutdown()


def describe(index: int, properties) -> Gpu:
    """A Gpu from what ``torch.cuda.get_device_properties`` returns."""
    p = properties
    capability = f"{p.major}.{p.minor}"
    return Gpu(index, p.name, p.multi_processor_count, p.L2_cache_size, p.total_memory, capability)


def links_between(handles: list, nvml) -> tuple[tuple[str, ...], ...]:
    """How each GPU reaches each other, as ``nvidia-smi topo -m`` shows it.

    NV#    # NVLinks, directly or through NVSwitch
    PIX    at most one PCIe switch between them
    PXB    several PCIe switches
    PHB    the PCIe host bridge of the processor
    NODE   several host bridges of one NUMA node
    SYS    the connection between NUMA nodes

    ``handles`` are NVML device handles, ``nvml`` is the pynvml module or anything with the same functions."""
    ends = [_nvlink_ends(handle, nvml) for handle in handles]
    addresses = [nvml.nvmlDeviceGetPciInfo(handle).busId for handle in handles]

    def reach(i: int, j: int) -> str:
        if i == j:
            return "X"
        direct = ends[i].count(addresses[j])
        switched = min(ends[i].count("switch"), ends[j].count("switch"))
        if direct or switched:
            return f"NV{direct or switched}"
        return _pcie_words(nvml)[nvml.nvmlDeviceGetTopologyCommonAncestor(handles[i], handles[j])]

    return tuple(tuple(reach(i, j) for j in range(len(handles))) for i in range(len(handles)))


def _nvlink_ends(handle, nvml) -> list[str]:
    """Where each active NVLink of a GPU ends: the PCI address of another GPU, or "switch"."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                ends.append("switch")
            else:
                ends.append(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
        except nvml.NVMLError:  # no such link on this GPU
            continue
    return ends


def _pcie_words(nvml) -> dict[int, str]:
    return {
        nvml.NVML_TOPOLOGY_INTERNAL: "PIX",  # two GPUs on one board
        nvml.NVML_TOPOLOGY_SINGLE: "PIX",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        nvml.NVML_TOPOLOGY_NODE: "NODE",
        nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }
