"""The collectives, from send and receive only.

    from lecture_lib import collectives as c
    c.ring_all_reduce(tensor)                   # in place, like dist.all_reduce

Read in this order:

    exchange.py      the one primitive: some sends and receives that happen together; splitting and combining tensors
    naive.py         everything to rank 0 and back
    ring.py          every rank sends to its neighbour only
    bidirectional.py two half rings, one in each direction
    tree.py          twice as many ranks know it after each step
    doubling.py      partners 1, 2, 4 apart exchange everything
    halving.py       partners exchange half, a quarter, an eighth
    hierarchical.py  within each node, then across nodes
    pairwise.py      all-to-all, one partner at a time
    shared.py        no messages: every rank reads and writes the memory of all others
    agreement.py     why a mistake on one rank is one clear error on all of them
    cost.py          how long each should take: the alpha-beta model, fitted to this machine
    bench.py         how long each takes: the table of NCCL tests

Each function takes what its namesake in torch.distributed takes: ``op`` is a dist.ReduceOp (SUM, AVG, MIN, MAX or
PRODUCT), ``group`` a process group, ``src`` and ``dst`` are global ranks.
"""

from lecture_lib.collectives.bidirectional import (
    bidirectional_ring_all_gather,
    bidirectional_ring_all_reduce,
    bidirectional_ring_reduce_scatter,
)
from lecture_lib.collectives.doubling import recursive_doubling_all_gather, recursive_doubling_all_reduce
from lecture_lib.collectives.halving import halving_doubling_all_reduce, recursive_halving_reduce_scatter
from lecture_lib.collectives.hierarchical import hierarchical_all_gather, hierarchical_all_reduce
from lecture_lib.collectives.naive import (
    naive_all_gather,
    naive_all_reduce,
    naive_all_to_all,
    naive_broadcast,
    naive_gather,
    naive_reduce,
    naive_reduce_scatter,
    naive_scatter,
)
from lecture_lib.collectives.pairwise import pairwise_all_to_all
from lecture_lib.collectives.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce,
    ring_reduce_scatter,
)
from lecture_lib.collectives.tree import tree_all_reduce, tree_broadcast, tree_gather, tree_reduce, tree_scatter

__all__ = [
    "bidirectional_ring_all_gather",
    "bidirectional_ring_all_reduce",
    "bidirectional_ring_reduce_scatter",
    "halving_doubling_all_reduce",
    "hierarchical_all_gather",
    "hierarchical_all_reduce",
    "naive_all_gather",
    "naive_all_reduce",
    "naive_all_to_all",
    "naive_broadcast",
    "naive_gather",
    "naive_reduce",
    "naive_reduce_scatter",
    "naive_scatter",
    "pairwise_all_to_all",
    "recursive_doubling_all_gather",
    "recursive_doubling_all_reduce",
    "recursive_halving_reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_broadcast",
    "ring_reduce",
    "ring_reduce_scatter",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_gather",
    "tree_reduce",
    "tree_scatter",
]
