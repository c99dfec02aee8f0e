"""What the widgets on scaling share: how fast GPUs compute, and how long an all-reduce takes among them."""

from lecture_lib.collectives.cost import Fit
from lecture_lib.hardware import get

MFU = 0.4  # share of the peak that a good training run computes with
BYTES = 2  # of a number in bf16
# Seconds for a step of a ring, however short the message: NCCL's own model, src/graph/tuning.cc, protocol "Simple".
ALPHA_LINK, ALPHA_NETWORK = 3.4e-6, 14e-6


def all_reduce_seconds(gpu: str, ranks: int, nbytes: float) -> float:
    """An all-reduce within each node and then across nodes, each GPU with a network card of its own."""
    chip = get(gpu)
    inside = min(ranks, chip.domain)
    seconds = Fit(ALPHA_LINK, 1 / chip.link_bandwidth).seconds("ring_all_reduce", inside, nbytes)
    return seconds + Fit(ALPHA_NETWORK, 1 / chip.nic_bandwidth).seconds(
        "ring_all_reduce", ranks // inside, nbytes / inside
    )
