"""What vendors print about accelerators and networks, each number with the place where it is printed.

Three traps, and how the numbers here stay out of them:

    sparse     NVIDIA's datasheets since Ampere print peaks for matrices with half of the entries zero. All peaks here
               are dense: half of that.
    direction  A link of "900 GB/s" carries 450 GB/s each way. All link and network rates here are per direction.
    GB         Memory sold as 80 GB is 80 x 2^30 bytes. Rates are powers of ten: 1 GB/s is 1e9 bytes per second.
"""

import re
from dataclasses import dataclass, field

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Accelerator:
    """One accelerator. None where no figure is published. ``source("bf16")`` says where a number comes from."""

    name: str
    memory_bytes: int | None = None  # what the chip's memory (HBM) holds
    memory_bandwidth: float | None = None  # bytes/s
    l2_bytes: int | None = None
    l2_bandwidth: float | None = None  # bytes/s, reads, all SMs together
    l1_bytes_per_sm: int | None = None  # L1 cache and shared memory together
    shared_bytes_per_sm: int | None = None  # of that, at most this much as shared memory
    register_bytes_per_sm: int | None = None
    sm_count: int | None = None  # streaming multiprocessors; compute units (AMD), TensorCores (TPU)
    boost_clock: float | None = None  # Hz, while the matrix units run at their peak
    bf16: float | None = None  # dense peaks, FLOP/s; bf16, fp16, fp8 and tf32 in the matrix units
    fp16: float | None = None
    fp8: float | None = None
    tf32: float | None = None
    fp32: float | None = None  # outside the matrix units
    link: str | None = None  # to other accelerators
    links: int | None = None
    link_bandwidth: float | None = None  # bytes/s per direction, all links of one accelerator together
    domain: int | None = None  # how many accelerators these links join
    host_link: str | None = None
    host_bandwidth: float | None = None  # bytes/s per direction
    nic: str | None = None  # the usual one; one per accelerator
    nic_bandwidth: float | None = None  # bytes/s per direction
    power_watts: float | None = None
    sources: dict = field(default_factory=dict, repr=False, compare=False)  # name of the field -> where it is from

    def source(self, name: str) -> str:
        """Where the figure called ``name`` comes from."""
        if name not in self.sources:
            raise KeyError(f"{self.name} has no figure called {name!r}; it has {', '.join(self.sources)}.")
        return self.sources[name]

    def peak(self, dtype) -> float:
        """Dense peak in FLOP/s for ``dtype``: "bf16", "bfloat16", torch.bfloat16 and so on."""
        name = short_dtype(dtype)
        if getattr(self, name, None) is None:
            known = ", ".join(n for n in DTYPE_BYTES if getattr(self, n))
            raise ValueError(f"no {name} peak is published for {self.name}; use one of {known}.")
        return getattr(self, name)


DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # tf32 is how fp32 numbers are multiplied
_LONG = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def short_dtype(dtype) -> str:
    """ "bf16" for "bfloat16" or torch.bfloat16. Raises ValueError for a type that has no peak here."""
    name = str(dtype).removeprefix("torch.")
    name = "fp8" if name.startswith("float8") else _LONG.get(name, name)
    if name not in DTYPE_BYTES:
        raise ValueError(f"there are no figures for the number type {dtype}; use one of {', '.join(DTYPE_BYTES)}.")
    return name


def _accelerator(name: str, cited: dict[str, dict]) -> Accelerator:
    """An accelerator from figures grouped by source, so that no figure can be written down without one."""
    figures = {figure: value for group in cited.values() for figure, value in group.items()}
    sources = {figure: source for source, group in cited.items() for figure in group}
    assert len(sources) == sum(len(group) for group in cited.values()), f"{name}: a figure has two sources"
    return Accelerator(name, **figures, sources=sources)


# ---- networks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A link that leaves the accelerator. ``bandwidth`` in bytes/s per direction."""

    name: str
    bandwidth: float
    source: str


_PCI_SIG = "PCI Express Base Specification: {} GT/s per lane and direction, 16 lanes, 128 of 130 bits are data"
_IBTA = "InfiniBand Trade Association roadmap: {} Gbit/s for 4 lanes, https://www.infinibandta.org/infiniband-roadmap/"

NETWORKS = {
    network.name: network
    for network in (
        Network("PCIe Gen4 x16", 16e9 / 8 * 16 * 128 / 130, _PCI_SIG.format(16)),
        Network("PCIe Gen5 x16", 32e9 / 8 * 16 * 128 / 130, _PCI_SIG.format(32)),
        Network("InfiniBand HDR 200", 200e9 / 8, _IBTA.format(200)),
        Network("InfiniBand NDR 400", 400e9 / 8, _IBTA.format(400)),
        Network("Ethernet 100", 100e9 / 8, "IEEE 802.3ba: 100 Gbit/s per direction"),
        Network("Ethernet 400", 400e9 / 8, "IEEE 802.3bs: 400 Gbit/s per direction"),
    )
}


def _network(name: str) -> float:
    return NETWORKS[name].bandwidth


# ---- accelerators ----------------------------------------------------------------------------------------------------

_SIZE = "; the GB of memory sizes are 2^30 bytes, as nvidia-smi shows"
_A100 = "NVIDIA A100 datasheet, https://www.nvidia.com/en-us/data-center/a100/"
_A100_PAPER = "NVIDIA A100 Tensor Core GPU Architecture, whitepaper V1.0"
_H100 = "NVIDIA H100 datasheet, https://www.nvidia.com/en-us/data-center/h100/"
_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture, whitepaper V1.04"
_HOPPER_TUNING = "NVIDIA Hopper Tuning Guide, https://docs.nvidia.com/cuda/hopper-tuning-guide/"
_H200 = "NVIDIA H200 datasheet, https://www.nvidia.com/en-us/data-center/h200/"
_FLASH3 = (
    "Shah et al., FlashAttention-3, 2024, table 1, https://arxiv.org/abs/2407.08608: as given there for an H100 SXM5"
)
_BLACKWELL = "NVIDIA Blackwell datasheet, per GPU, https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
_HGX = "NVIDIA HGX B200, eight GPUs, https://www.nvidia.com/en-us/data-center/hgx/"
_BLACKWELL_TUNING = "NVIDIA Blackwell Tuning Guide, https://docs.nvidia.com/cuda/blackwell-tuning-guide/"
_NVL72 = "NVIDIA GB200 NVL72, 72 GPUs, https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
_MI300X = "AMD Instinct MI300X data sheet, https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_CDNA3 = "AMD CDNA 3 Architecture, whitepaper"
_ROCM = "ROCm documentation, GPU specifications, https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
_V5P = "Google Cloud documentation, TPU v5p, https://docs.cloud.google.com/tpu/docs/v5p"
_PCIE4 = dict(host_link="PCIe Gen4 x16", host_bandwidth=_network("PCIe Gen4 x16"))
_PCIE5 = dict(host_link="PCIe Gen5 x16", host_bandwidth=_network("PCIe Gen5 x16"))
_HDR = dict(nic="InfiniBand HDR 200", nic_bandwidth=_network("InfiniBand HDR 200"))
_NDR = dict(nic="InfiniBand NDR 400", nic_bandwidth=_network("InfiniBand NDR 400"))

A100 = _accelerator(
    "A100",
    {
        _A100 + ", the 80 GB SXM version": dict(
            memory_bandwidth=2.039e12, bf16=312e12, fp16=312e12, tf32=156e12, fp32=19.5e12, power_watts=400.0
        ),
        _A100 + _SIZE: dict(memory_bytes=80 * GIB),
        _A100_PAPER: dict(
            sm_count=108,
            boost_clock=1.41e9,
            l2_bytes=40 * MIB,
            l1_bytes_per_sm=192 * KIB,
            shared_bytes_per_sm=164 * KIB,
            register_bytes_per_sm=256 * KIB,
        ),
        _A100_PAPER + ": computed, 5120 bytes per clock x 1.41 GHz": dict(l2_bandwidth=5120 * 1.41e9),
        _A100_PAPER + ": 12 links of 25 GB/s per direction; 600 GB/s counts both directions": dict(
            link="NVLink 3", links=12, link_bandwidth=12 * 25e9
        ),
        "NVIDIA DGX A100 datasheet: eight GPUs behind NVSwitch": dict(domain=8),
        "NVIDIA DGX A100 datasheet: one 200 Gbit/s ConnectX-6 per GPU": _HDR,
        _A100 + ": PCIe Gen4; rate from the PCI Express specification": _PCIE4,
    },
)

# H100 and H200 are the same chip with different memory.
_HOPPER = {
    _H100_PAPER: dict(
        sm_count=132,
        l2_bytes=50 * MIB,
        l1_bytes_per_sm=256 * KIB,
        register_bytes_per_sm=256 * KIB,
        bf16=989.4e12,
        fp16=989.4e12,
        fp8=1978.9e12,
        tf32=494.7e12,
        fp32=66.9e12,
    ),
    _HOPPER_TUNING: dict(shared_bytes_per_sm=228 * KIB),
    _H100_PAPER + ": computed, 989.4 TFLOP/s / (132 SMs x 4096 FLOP per clock)": dict(boost_clock=1.83e9),
    _FLASH3: dict(l2_bandwidth=12e12),
    _H100_PAPER + ": 18 links of 25 GB/s per direction; 900 GB/s counts both directions": dict(
        link="NVLink 4", links=18, link_bandwidth=18 * 25e9
    ),
    "NVIDIA DGX H100 and H200 datasheet: eight GPUs behind NVSwitch": dict(domain=8),
    "NVIDIA DGX H100 and H200 datasheet: one 400 Gbit/s ConnectX-7 per GPU": _NDR,
    _H100 + ": PCIe Gen5; rate from the PCI Express specification": _PCIE5,
}

H100 = _accelerator(
    "H100",
    _HOPPER
    | {
        _H100 + ", the SXM version": dict(memory_bandwidth=3.35e12, power_watts=700.0),
        _H100 + _SIZE: dict(memory_bytes=80 * GIB),
    },
)

H200 = _accelerator(
    "H200",
    _HOPPER
    | {
        _H200 + ", the SXM version": dict(memory_bandwidth=4.8e12, power_watts=700.0),
        _H200 + _SIZE: dict(memory_bytes=141 * GIB),
    },
)

_BLACKWELL_CHIP = {
    _BLACKWELL_TUNING: dict(l1_bytes_per_sm=256 * KIB, shared_bytes_per_sm=228 * KIB, register_bytes_per_sm=256 * KIB),
    "CUDA's device properties of a B200: 126.5 MiB, https://github.com/pytorch/ao/pull/4002": dict(
        l2_bytes=int(126.5 * MIB)
    ),
    _BLACKWELL_TUNING + ": 18 links of 50 GB/s per direction; 1.8 TB/s counts both directions": dict(
        link="NVLink 5", links=18, link_bandwidth=18 * 50e9
    ),
}

B200 = _accelerator(
    "B200",
    _BLACKWELL_CHIP
    | {
        _BLACKWELL: dict(memory_bandwidth=7.7e12, power_watts=1000.0),
        _BLACKWELL + _SIZE: dict(memory_bytes=180 * GIB),
        "CUDA's device properties, https://github.com/pytorch/ao/pull/4002": dict(sm_count=148),
        _HGX + ": 72 PFLOP/s fp8, 36 bf16 and fp16, 18 tf32, all with sparsity, / 8 / 2 = dense, of one": dict(
            fp8=72e15 / 16, bf16=36e15 / 16, fp16=36e15 / 16, tf32=18e15 / 16
        ),
        _HGX + ": 600 TFLOP/s / 8": dict(fp32=75e12),
        _HGX + ": computed, 2.25 PFLOP/s / (148 SMs x 8192 FLOP per clock)": dict(boost_clock=1.856e9),
        _HGX + ": eight GPUs behind NVSwitch": dict(domain=8),
        "NVIDIA DGX B200 datasheet: one 400 Gbit/s ConnectX-7 per GPU": _NDR,
        _HGX + ": PCIe Gen5; rate from the PCI Express specification": _PCIE5,
    },
)

GB200 = _accelerator(
    "GB200",
    _BLACKWELL_CHIP
    | {
        _NVL72 + ": 576 TB/s / 72": dict(memory_bandwidth=8e12),
        _BLACKWELL + _SIZE: dict(memory_bytes=186 * GIB),
        _BLACKWELL: dict(power_watts=1200.0),
        _NVL72 + ": 720 PFLOP/s fp8, 360 bf16 and fp16, 180 tf32, all with sparsity, / 72 / 2 = dense, of one": dict(
            fp8=720e15 / 144, bf16=360e15 / 144, fp16=360e15 / 144, tf32=180e15 / 144
        ),
        _NVL72 + ": 5,760 TFLOP/s / 72": dict(fp32=80e12),
        "FlashInfer's kernel notes for a GB200, https://github.com/flashinfer-ai/flashinfer/issues/5716": dict(
            sm_count=152
        ),
        _NVL72 + ": computed, 2.5 PFLOP/s / (152 SMs x 8192 FLOP per clock)": dict(boost_clock=2.008e9),
        _NVL72 + ": NVLink Switch trays join the 72 GPUs of a rack": dict(domain=72),
        _NVL72 + ": one Grace CPU and two GPUs share 450 GB/s per direction (900 GB/s counts both)": dict(
            host_link="NVLink-C2C", host_bandwidth=225e9
        ),
        "NVIDIA DGX GB200 datasheet: one 400 Gbit/s ConnectX-7 per GPU": _NDR,
    },
)

MI300X = _accelerator(
    "MI300X",
    {
        _MI300X + ", peaks without sparsity": dict(
            memory_bandwidth=5.3e12,
            sm_count=304,
            boost_clock=2.1e9,
            bf16=1307.4e12,
            fp16=1307.4e12,
            fp8=2614.9e12,
            tf32=653.7e12,
            fp32=163.4e12,
            power_watts=750.0,
        ),
        _ROCM + ", GiB": dict(memory_bytes=192 * GIB),
        _ROCM + ": 4 MiB in each of 8 dies; behind it lie 256 MiB of Infinity Cache": dict(l2_bytes=32 * MIB),
        _ROCM + ": 32 KiB of vector L1 and 64 KiB of LDS, two separate memories": dict(l1_bytes_per_sm=96 * KIB),
        _ROCM + ": LDS": dict(shared_bytes_per_sm=64 * KIB),
        _ROCM + ": vector registers": dict(register_bytes_per_sm=512 * KIB),
        _CDNA3 + ": computed, 8 dies x 2048 bytes per clock x 2.1 GHz": dict(l2_bandwidth=8 * 2048 * 2.1e9),
        _MI300X + ": 7 links of 64 GB/s per direction (128 GB/s counts both), one to each other GPU, no switch": dict(
            link="Infinity Fabric", links=7, link_bandwidth=7 * 64e9, domain=8
        ),
        _MI300X + ": PCIe Gen5; rate from the PCI Express specification": _PCIE5,
        "Azure ND MI300X v5: one 400 Gbit/s adapter per GPU, https://learn.microsoft.com/azure/virtual-machines/sizes/"
        "gpu-accelerated/nd-mi300x-v5-series": _NDR,
    },
)

TPU_V5P = _accelerator(
    "TPU v5p",
    {
        _V5P + ": two TensorCores in a chip": dict(sm_count=2),
        _V5P + "; fp8 runs at the rate of bf16, so there is no peak for it here": dict(bf16=459e12),
        _V5P + ", HBM": dict(memory_bandwidth=2.765e12),
        _V5P + ": 95 GiB for programs of 96": dict(memory_bytes=95 * GIB),
        _V5P + ": 1,200 GB/s counts both directions of the 6 links of a 3D torus; 4,800 Gbit/s is one of them": dict(
            link="ICI", links=6, link_bandwidth=1200e9 / 2
        ),
        _V5P + ": chips in a pod": dict(domain=8960),
        _V5P + ": 50 Gbit/s of data center network per chip": dict(nic="data center network", nic_bandwidth=50e9 / 8),
    },
)

ACCELERATORS = (A100, H100, H200, B200, GB200, MI300X, TPU_V5P)


# ---- the same chip with other memory ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Memory that an accelerator is also built with. ``gigabytes`` of 2^30 bytes, ``bandwidth`` in bytes/s."""

    accelerator: str
    gigabytes: int
    bandwidth: float
    source: str


_TITAN = (
    "W. Liang et al., TorchTitan, and its benchmarks of December 2024, https://github.com/pytorch/torchtitan/blob/main/"
    "benchmarks/llama3_h100_202412_torchtitan.md: H100s in SXM with 96 GB of HBM2e that move 2.4 TB/s"
)

MEMORIES = (
    Memory("A100", 40, 1.555e12, _A100 + ", the 40 GB version"),
    Memory("H100", 96, 2.4e12, _TITAN),
    Memory("H100", 94, 2.4e12, _TITAN + "; its benchmarks before that call the size 94 GB"),
)

# Versions under the same name whose figures differ from those above.
_OTHER_VERSIONS = re.compile(r"pcie|nvl(?!72)|40 ?gb|mi300a")


def get(name: str) -> Accelerator:
    """The accelerator for a name as people and drivers write it: "H100", "h100 sxm", "NVIDIA H100 80GB HBM3"."""
    wanted = name.lower()
    if _OTHER_VERSIONS.search(wanted):
        raise KeyError(
            f"{name!r} is another version than the one listed, with other figures; the NVIDIA ones here are SXM (A100 "
            f"with 80 GB) and GB200 NVL72. Ask for one of {_known()} if the listed version is good enough."
        )
    for accelerator in ACCELERATORS:
        key = accelerator.name.lower().removeprefix("tpu ")
        if re.search(rf"(?<![a-z0-9])(?:tpu)?{key}(?=sxm|nvl|[^a-z0-9]|$)", wanted):
            return accelerator
    raise KeyError(f"no figures for {name!r}; known are {_known()}.")


def _known() -> str:
    return ", ".join(accelerator.name for accelerator in ACCELERATORS)


# ---- the ladder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A place where data can be. ``capacity`` in bytes, ``bandwidth`` towards the compute units in bytes/s per
    direction; None where it is not known."""

    name: str
    capacity: int | None
    bandwidth: float | None
    source: str

    def seconds(self, nbytes: float = 1e9) -> float | None:
        """How long ``nbytes`` take from here to the compute units, at the full rate."""
        return None if self.bandwidth is None else nbytes / self.bandwidth


def ladder(accelerator: Accelerator) -> list[Step]:
    """The steps from an accelerator's registers to the network. What is None in the figures is None here too."""
    a = accelerator
    sms = f"{a.sm_count} SMs"
    return [
        Step(
            "registers",
            _product(a.sm_count, a.register_bytes_per_sm),
            _product(a.fp32, 6),
            "computed: at the fp32 peak each multiply-add (2 FLOP) reads three numbers of 4 bytes",
        ),
        Step(
            "L1 and shared memory",
            _product(a.sm_count, a.l1_bytes_per_sm),
            # Of a TPU's memory next to the compute units no rate is published.
            _product(a.sm_count, 128, a.boost_clock) if a.l1_bytes_per_sm else None,
            f"computed: {sms} x 128 bytes per clock (32 banks of 4 bytes) x boost clock",
        ),
        Step("L2", a.l2_bytes, a.l2_bandwidth, a.sources.get("l2_bandwidth", "no published rate")),
        Step("HBM", a.memory_bytes, a.memory_bandwidth, a.sources["memory_bandwidth"]),
        Step(
            f"{a.link}, {a.domain} accelerators",
            _product(a.domain, a.memory_bytes),
            a.link_bandwidth,
            a.sources["link_bandwidth"],
        ),
        Step(f"host, {a.host_link}", None, a.host_bandwidth, a.sources.get("host_bandwidth", "no published rate")),
        Step(f"network, {a.nic}", None, a.nic_bandwidth, a.sources["nic_bandwidth"]),
    ]


def _product(*factors):
    """The product, or None if a factor is None."""
    result = 1
    for factor in factors:
        if factor is None:
            return None
        result *= factor
    return result


# ---- energy ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Energy:
    """What one operation or one access costs. ``joules`` for all of it, ``nbytes`` moved, None for arithmetic."""

    name: str
    joules: float
    nbytes: int | None
    source: str

    @property
    def joules_per_byte(self) -> float | None:
        return None if self.nbytes is None else self.joules / self.nbytes


_HOROWITZ = (
    "M. Horowitz, Computing's energy problem, ISSCC 2014, https://doi.org/10.1109/ISSCC.2014.6757323: "
    "45 nm at 0.9 V, so only the ratios still hold"
)

ENERGY = (
    Energy("add two 32-bit floating-point numbers", 0.9e-12, None, _HOROWITZ),
    Energy("multiply two 32-bit floating-point numbers", 3.7e-12, None, _HOROWITZ),
    Energy("read 8 bytes from an 8 KB cache", 10e-12, 8, _HOROWITZ),
    Energy("read 8 bytes from a 32 KB cache", 20e-12, 8, _HOROWITZ),
    Energy("read 8 bytes from a 1 MB cache", 100e-12, 8, _HOROWITZ),
    Energy("read 8 bytes from DRAM", 1.3e-9, 8, _HOROWITZ + "; the lower end of 1.3 to 2.6 nJ"),
    Energy(
        "move 1 byte from HBM2",
        8 * 3.92e-12,
        1,
        "O'Connor et al., Fine-Grained DRAM, MICRO 2017, https://doi.org/10.1145/3123939.3124545: 3.92 pJ per bit",
    ),
)
