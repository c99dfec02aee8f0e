"""How long a collective should take: the alpha-beta model.

    time = steps x alpha + bytes x beta

alpha: seconds that a message takes however short it is; beta: seconds per byte, one over the bandwidth. ``steps`` are
messages that wait for one another, ``bytes`` what the busiest link carries in one direction. Both follow from the
algorithm; alpha and beta belong to the machine and are fitted to measurements. Adding up is not counted.
Source: Hockney, The communication challenge for MPP, 1994; Thakur et al., 2005, section 3.
"""

import math
from typing import NamedTuple

import numpy as np

from lecture_lib.collectives.bench import Row


class Cost(NamedTuple):
    """``steps``: messages one after the other. ``share``: bytes on the busiest link, as a multiple of S, the bytes of
    the whole tensor (see bench.py)."""

    steps: int
    share: float


def _log(n: int) -> int:
    return math.ceil(math.log2(n))


def cost(algorithm: str, n: int, ranks_per_node: int | None = None) -> Cost:
    """Of a function of this package on n ranks. S is the whole tensor: the output of an all-gather or gather, the input
    of a reduce-scatter, scatter or all-to-all.

    Raises ValueError for a name that the package lacks.
    """
    if n == 1:
        return Cost(0, 0.0)
    share, log = (n - 1) / n, _log(n)
    p = 1 << (n.bit_length() - 1)  # the power of two that doubling and halving work with
    folded = 2 * (n > p)
    costs = {
        "naive_broadcast": Cost(1, n - 1),  # the messages leave the root at the same time and share its link
        "naive_scatter": Cost(1, share),
        "naive_gather": Cost(1, share),
        "naive_reduce": Cost(n - 1, n - 1),
        "naive_all_reduce": Cost(n, 2 * (n - 1)),
        "naive_all_gather": Cost(2, share + n - 1),
        "naive_reduce_scatter": Cost(n, n - 1 + share),
        "naive_all_to_all": Cost(1, share),
        "pairwise_all_to_all": Cost(n - 1, share),
        "ring_all_reduce": Cost(2 * (n - 1), 2 * share),
        "ring_reduce_scatter": Cost(n - 1, share),
        "ring_all_gather": Cost(n - 1, share),
        "ring_broadcast": Cost(2 * n - 2, (2 * n - 2) / n),  # 2n - 2 steps of S/n from the root to the end of the chain
        "ring_reduce": Cost(2 * n - 2, (2 * n - 2) / n),
        "bidirectional_ring_all_reduce": Cost(2 * (n - 1), share),  # half of it on each direction of a link
        "bidirectional_ring_reduce_scatter": Cost(n - 1, share / 2),
        "bidirectional_ring_all_gather": Cost(n - 1, share / 2),
        "tree_broadcast": Cost(log, log),
        "tree_reduce": Cost(log, log),
        "tree_all_reduce": Cost(2 * log, 2 * log),
        "tree_scatter": Cost(log, share),
        "tree_gather": Cost(log, share),
        "recursive_doubling_all_reduce": Cost(_log(p) + folded, _log(p) + folded),
        "recursive_doubling_all_gather": Cost(log, share),
        "halving_doubling_all_reduce": Cost(2 * _log(p) + folded, 2 * (p - 1) / p + folded),
        "recursive_halving_reduce_scatter": Cost(_log(p) + folded, (p - 1) / p + folded * (1 + 1 / n) / 2),
    }
    if algorithm in ("hierarchical_all_reduce", "hierarchical_all_gather"):
        k = ranks_per_node or n
        m = n // k
        reduces = algorithm == "hierarchical_all_reduce"
        return Cost(2 * (k - 1 + m - 1), 2 * share) if reduces else Cost(m - 1 + m * (k - 1), share)
    if algorithm not in costs:
        raise ValueError(f"there is no algorithm {algorithm!r}; choose one of {', '.join(costs)}.")
    return costs[algorithm]


class Fit(NamedTuple):
    """alpha in seconds, beta in seconds per byte; ``residual``: median of |predicted / measured - 1|."""

    alpha: float
    beta: float
    residual: float

    def seconds(self, algorithm: str, n: int, nbytes: int) -> float:
        """Predicted time of one call with a tensor of ``nbytes``."""
        steps, share = cost(algorithm, n)
        return steps * self.alpha + share * nbytes * self.beta


def fit(rows: list[Row]) -> Fit:
    """alpha and beta by least squares on relative errors, so that the small sizes count as much as the large ones.

    Raises ValueError for fewer than two rows.
    """
    if len(rows) < 2:
        raise ValueError(f"alpha and beta need at least 2 measurements and got {len(rows)}.")
    costs = [cost(row.algorithm, row.ranks) for row in rows]
    design = np.array(
        [[c.steps / row.seconds, c.share * row.nbytes / row.seconds] for c, row in zip(costs, rows, strict=True)]
    )
    (alpha, beta), *_ = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)
    found = Fit(max(float(alpha), 0.0), max(float(beta), 0.0), 0.0)
    off = [abs(found.seconds(row.algorithm, row.ranks, row.nbytes) / row.seconds - 1) for row in rows]
    return found._replace(residual=float(np.median(off)))


def crossover(few_steps: str, few_bytes: str, n: int, machine: Fit) -> float:
    """The size in bytes at which both take the same time: below it the one with fewer steps is faster, above it the one
    with fewer bytes. 0 if the second is never slower, infinity if the first is never slower."""
    a, b = cost(few_steps, n), cost(few_bytes, n)
    steps, share = b.steps - a.steps, a.share - b.share
    if steps <= 0:
        return 0.0
    return steps * machine.alpha / (share * machine.beta) if share > 0 else math.inf
