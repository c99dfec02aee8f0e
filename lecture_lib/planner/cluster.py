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
from lecture_lib.hardware.specs import GIB
from lecture_lib.planner.numbers import missing, positive, whole

# "80GB", "80 GiB", "80g", or a number that nothing follows: "A100-80"; "500W", "500 watts".
_SIZE = re.compile(r"(?<![a-z0-9])(\d+) ?(?:gi?b?(?![a-z])|$)")
_LIMIT = re.compile(r"(?<![a-z0-9])(\d+) ?w(?:atts?)?(?![a-z])")


@functools.cache
def accelerator(name: str) -> specs.Accelerator:
    """The GPU for a name: "H100", "A100-40GB", "a100_40gb", "H100-96GB-500W" (power limited to 500 W).

    Raises ValueError for a GPU, a memory size or a power limit that is not known.
    """
    written = re.sub(r"[-_/,()\s]+", " ", str(name).lower()).strip()
    size, limit = _SIZE.search(written), _LIMIT.search(written)
    chip = _LIMIT.sub("", _SIZE.sub("", written))
    try:
        found = specs.get(chip)
    except KeyError as error:
        raise ValueError(error.args[0].replace(repr(chip), repr(name))) from None
    if size and int(size[1]) * GIB != found.memory_bytes:
        others = {m.gigabytes: m for m in specs.MEMORIES if m.accelerator == found.name}
        if int(size[1]) not in others:
            known = ", ".join(f"{found.name}-{n}GB" for n in sorted({found.memory_bytes // GIB, *others}))
            raise ValueError(f"no figures for a {found.name} with {size[1]} GB; known are {known}.")
        memory = others[int(size[1])]
        found = replace(found, memory_bytes=memory.gigabytes * GIB, memory_bandwidth=memory.bandwidth)
    if limit:
        watts, own = int(limit[1]), found.power_watts
        if own is None:
            raise ValueError(f"no power limit of a {found.name} is published, so it cannot be limited to {watts} W.")
        if not 0.3 * own <= watts <= own:
            raise ValueError(f"a {found.name} cannot be limited to {watts} W: its own limit is {own:.0f} W.")
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
