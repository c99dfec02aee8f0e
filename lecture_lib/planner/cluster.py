"""The machine: which GPU, how many, how they are joined. All rates from lecture_lib.hardware.

A group of n ranks that are k apart (k = 1 for neighbours) lies in nodes, gpus_per_node = N GPUs each:

    r = min(n, N / k)            of its ranks are in one node
    n k <= N                     all of them: NVLink carries everything
    else                         the slowest link counts: each ring of the collective leaves a node once, and r rings
                                 share r network adapters, so a rank sees min(NVLink, r x network / oversubscription)

Source for the last line: NCCL joins one ring for each adapter, https://docs.nvidia.com/deeplearning/nccl/; Thakur et
al., 2005, for what a ring costs.
"""

import functools
import re
from dataclasses import dataclass, replace

from lecture_lib.hardware import specs
from lecture_lib.planner.numbers import missing, positive, whole

GIB = 2**30

# Versions of a GPU by the size of their memory, GB: bandwidth in bytes/s and where it is from.
_MEMORIES = {
    ("A100", 40): (1.555e12, "NVIDIA A100 datasheet, the 40 GB version"),
    ("A100", 80): (2.039e12, "NVIDIA A100 datasheet, the 80 GB SXM version"),
    ("H100", 80): (3.35e12, "NVIDIA H100 datasheet, SXM"),
    # torchtitan's paper (https://arxiv.org/abs/2410.06511) says HBM2e; NVIDIA's H100 PCIe moves 2.0e12 with 5 stacks.
    ("H100", 96): (2.0e12 * 6 / 5, "computed: 6 stacks of HBM2e, of which the 5 of an H100 PCIe move 2.0 TB/s"),
    ("H200", 141): (4.8e12, "NVIDIA H200 datasheet, SXM"),
}


@functools.cache
def accelerator(name: str) -> specs.Accelerator:
    """The GPU for a name: "H100", "A100-40GB", "H100-96GB-500W" (power limited to 500 W).

    Raises ValueError for a GPU, a memory size or a power limit that is not known.
    """
    size, limit = re.search(r"(\d+) ?gb(?!\d)", name.lower()), re.search(r"(\d+) ?w(?![a-z])", name.lower())
    base = re.sub(r"[-_ ]*\b\d+ ?(gb|w)\b", "", name, flags=re.IGNORECASE)
    try:
        found = specs.get(base)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    if size:
        gigabytes = int(size[1])
        if (found.name, gigabytes) in _MEMORIES:
            found = replace(found, memory_bytes=gigabytes * GIB, memory_bandwidth=_MEMORIES[found.name, gigabytes][0])
        elif gigabytes * GIB != found.memory_bytes:
            known = ", ".join(f"{n}-{g}GB" for n, g in _MEMORIES if n == found.name)
            known = known or f"{found.name}-{found.memory_bytes // GIB}GB"
            raise ValueError(f"no figures for a {found.name} with {gigabytes} GB; known are {known}.")
    if limit:
        watts = int(limit[1])
        if found.power_watts is None or not 0.3 * found.power_watts <= watts <= found.power_watts:
            raise ValueError(
                f"a {found.name} cannot be limited to {watts} W: its own limit is {found.power_watts:.0f} W."
            )
        found = replace(found, power_watts=float(watts))
    return found


@dataclass(frozen=True)
class Cluster:
    """``gpus`` GPUs of type ``gpu``, ``gpus_per_node`` of them joined by NVLink, the nodes by a network.

    gpu: a name that lecture_lib.hardware knows, also with memory size or power limit ("A100-40GB", "H100-96GB-500W").
    gpus_per_node: the NVLink domain: 8 in most servers, 72 in an NVL72 rack; if not given, what the GPU's maker builds.
    internode_gbps_per_gpu: Gbit/s per direction of the network, for each GPU; the GPU's usual adapter, if not given.
    oversubscription: how many times less the network carries than its adapters, where traffic leaves a node.
    link_gbps_per_gpu, memory_gib: in place of the datasheet's, to ask what if.
    price_per_gpu_hour: in any currency, for the cost of a step.

    Raises ValueError for an unknown GPU, and for nodes that are not all full.
    """

    gpu: str = "H100"
    gpus: int = 8
    gpus_per_node: int | None = None
    internode_gbps_per_gpu: float | None = None
    oversubscription: float = 1.0
    link_gbps_per_gpu: float | None = None
    memory_gib: float | None = None
    price_per_gpu_hour: float | None = None

    def __post_init__(self):
        put = functools.partial(object.__setattr__, self)
        put("gpus", whole("gpus", self.gpus))
        domain = accelerator(self.gpu).domain
        put("gpus_per_node", whole("gpus_per_node", domain if missing(self.gpus_per_node) else self.gpus_per_node))
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.gpus} GPUs do not fill nodes of {self.gpus_per_node}: take a multiple, or say gpus_per_node."
            )
        for name in ("internode_gbps_per_gpu", "link_gbps_per_gpu", "memory_gib", "price_per_gpu_hour"):
            value = getattr(self, name)
            put(name, None if missing(value) else positive(name, value))
        if positive("oversubscription", self.oversubscription) < 1:
            raise ValueError(f"oversubscription must be at least 1, and is {self.oversubscription}.")

    @functools.cached_property
    def accelerator(self) -> specs.Accelerator:
        """The GPU's figures."""
        return accelerator(self.gpu)

    @functools.cached_property
    def nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)

    @functools.cached_property
    def memory_bytes(self) -> float:
        """Of one GPU."""
        return self.accelerator.memory_bytes if self.memory_gib is None else self.memory_gib * GIB

    @functools.cached_property
    def link(self) -> float:
        """NVLink, bytes/s per direction and GPU."""
        own = self.link_gbps_per_gpu
        return self.accelerator.link_bandwidth if own is None else own * 1e9 / 8

    @functools.cached_property
    def network(self) -> float:
        """Between nodes, bytes/s per direction and GPU, after oversubscription."""
        own = self.internode_gbps_per_gpu
        return (self.accelerator.nic_bandwidth if own is None else own * 1e9 / 8) / self.oversubscription

    def ranks_in_a_node(self, n: int, apart: int = 1) -> int:
        """r of the formula above."""
        return max(1, min(n, self.gpus_per_node // apart))

    def crosses_nodes(self, n: int, apart: int = 1) -> bool:
        """Whether a group of n ranks that are ``apart`` from each other leaves a node."""
        return n > 1 and n * apart > self.gpus_per_node
