"""How long a collective should take: the alpha-beta model.

    time = steps x alpha + bytes x beta

alpha: seconds that a message takes however short it is; beta: seconds per byte, one over the bandwidth. ``steps`` are
messages that wait for one another, ``bytes`` what the busiest link carries one after the other, whether in or out.
Both follow from the algorithm; alpha and beta belong to the machine and are fitted to measurements. Adding up is not
counted.

Where ranks are processes that share fewer cores than there are ranks, they take turns. Then a core has to handle its
share of all messages and all bytes, and that counts if it is more.
Source: Hockney, The communication challenge for MPP, 1994; Thakur et al., 2005, section 3.
"""

import math
from typing import NamedTuple

import numpy as np

from lecture_lib.collectives.bench import Row


class Cost(NamedTuple):
    """``steps``: messages one after the other. ``share``: bytes that the busiest link carries one after the other, as a
    multiple of S, the bytes of the whole tensor (see bench.py). ``messages``, ``total``: the same, of all ranks.
    """

    steps: float
    share: float
    messages: int
    total: float

    def on(self, cores: int | None) -> "Cost":
        """The same where all ranks take turns on so many cores. None: each has its own."""
        if cores is None:
            return self
        return self._replace(steps=max(self.steps, self.messages / cores), share=max(self.share, self.total / cores))


def _log(n: int) -> int:
    return math.ceil(math.log2(n))


def cost(algorithm: str, n: int, ranks_per_node: int | None = None) -> Cost:
    """Of a function of this package on n ranks. S is the whole tensor: the output of an all-gather or gather, the input
    of a reduce-scatter, scatter or all-to-all.

    A bidirectional ring counts as two links a rank, one to each neighbour. Raises ValueError for a name that the
    package lacks and for ranks_per_node that does not divide n.
    """
    k = ranks_per_node or n
    if n % k:
        raise ValueError(f"{n} ranks cannot be {k} to a node.")
    ways = 2 if n > 2 else 1  # two ranks are each other's neighbour on both sides
    m = n // k
    share, log = (n - 1) / n, _log(n)
    p = 1 << (n.bit_length() - 1)  # the power of two that doubling and halving work with
    extra, folds = n - p, 2 * (n > p)
    subtrees = sum(min(v & -v, n - v) for v in range(1, n)) / n  # what the ranks of a tree collect
    costs = {
        "naive_broadcast": Cost(
            1, n - 1, n - 1, n - 1
        ),  # the messages leave at the same time and share the root's link
        "naive_scatter": Cost(1, share, n - 1, share),
        "naive_gather": Cost(1, share, n - 1, share),
        "naive_reduce": Cost(n - 1, n - 1, n - 1, n - 1),
        "naive_all_reduce": Cost(n, 2 * (n - 1), 2 * (n - 1), 2 * (n - 1)),
        "naive_all_gather": Cost(2, share + n - 1, 2 * (n - 1), share + n - 1),
        "naive_reduce_scatter": Cost(n, n - 1 + share, 2 * (n - 1), n - 1 + share),
        "naive_all_to_all": Cost(1, share, n * (n - 1), n - 1),
        "pairwise_all_to_all": Cost(n - 1, share, n * (n - 1), n - 1),
        "ring_all_reduce": Cost(2 * (n - 1), 2 * share, 2 * n * (n - 1), 2 * (n - 1)),
        "ring_reduce_scatter": Cost(n - 1, share, n * (n - 1), n - 1),
        "ring_all_gather": Cost(n - 1, share, n * (n - 1), n - 1),
        "ring_broadcast": Cost(2 * n - 2, 2 * share, n * (n - 1), n - 1),  # 2n - 2 steps of S/n down the chain
        "ring_reduce": Cost(2 * n - 2, 2 * share, n * (n - 1), n - 1),
        "bidirectional_ring_all_reduce": Cost(2 * (n - 1), 2 * share / ways, 4 * n * (n - 1), 2 * (n - 1)),
        "bidirectional_ring_reduce_scatter": Cost(n - 1, share / ways, 2 * n * (n - 1), n - 1),
        "bidirectional_ring_all_gather": Cost(n - 1, share / ways, 2 * n * (n - 1), n - 1),
        "tree_broadcast": Cost(log, log, n - 1, n - 1),
        "tree_reduce": Cost(log, log, n - 1, n - 1),
        "tree_all_reduce": Cost(2 * log, 2 * log, 2 * (n - 1), 2 * (n - 1)),
        "tree_scatter": Cost(log, share, n - 1, subtrees),
        "tree_gather": Cost(log, share, n - 1, subtrees),
        "recursive_doubling_all_reduce": Cost(
            _log(p) + folds, _log(p) + folds, p * _log(p) + 2 * extra, p * _log(p) + 2 * extra
        ),
        "recursive_doubling_all_gather": Cost(log, share, n * log, n - 1),
        "halving_doubling_all_reduce": Cost(
            2 * _log(p) + folds, 2 * (p - 1) / p + folds, 2 * p * _log(p) + 2 * extra, 2 * (p - 1) + 2 * extra
        ),
        "recursive_halving_reduce_scatter": Cost(
            _log(p) + folds,
            (p - 1) / p + folds * (1 + 1 / n) / 2,
            p * _log(p) + 2 * extra,
            p - 1 + extra * (1 + 1 / n),
        ),
        "hierarchical_all_reduce": Cost(2 * (k + m - 2), 2 * share, 2 * n * (k + m - 2), 2 * (n - 1)),
        "hierarchical_all_gather": Cost(m * k - 1, share, n * (m * k - 1), n - 1),
    }
    if algorithm not in costs:
        raise ValueError(f"there is no algorithm {algorithm!r}; choose one of {', '.join(costs)}.")
    return costs[algorithm] if n > 1 else Cost(0, 0.0, 0, 0.0)


class Fit(NamedTuple):
    """alpha in seconds, beta in seconds per byte; ``cores`` that the ranks share, None if each has its own;
    ``residual``: median of |predicted / measured - 1|."""

    alpha: float
    beta: float
    residual: float = 0.0
    cores: int | None = None

    def seconds(self, algorithm: str, n: int, nbytes: int) -> float:
        """Predicted time of one call with a tensor of ``nbytes``."""
        steps, share, *_ = cost(algorithm, n).on(self.cores)
        return steps * self.alpha + share * nbytes * self.beta


def fit(rows: list[Row], cores: int | None = None) -> Fit:
    """alpha and beta by least squares on relative errors, so that the small sizes count as much as the large ones.

    Raises ValueError for fewer than two rows.
    """
    if len(rows) < 2:
        raise ValueError(f"alpha and beta need at least 2 measurements and got {len(rows)}.")
    costs = [cost(row.algorithm, row.ranks).on(cores) for row in rows]
    design = [[c.steps / row.seconds, c.share * row.nbytes / row.seconds] for c, row in zip(costs, rows, strict=True)]
    (alpha, beta), *_ = np.linalg.lstsq(np.array(design), np.ones(len(rows)), rcond=None)
    found = Fit(max(float(alpha), 0.0), max(float(beta), 0.0), 0.0, cores)
    off = [abs(found.seconds(row.algorithm, row.ranks, row.nbytes) / row.seconds - 1) for row in rows]
    return found._replace(residual=float(np.median(off)))


def crossover(few_steps: str, few_bytes: str, n: int, machine: Fit) -> float:
    """The size in bytes at which both take the same time: below it the one with fewer steps is faster, above it the one
    with fewer bytes. 0 if the second is never slower, infinity if it is never faster."""
    a, b = cost(few_steps, n).on(machine.cores), cost(few_bytes, n).on(machine.cores)
    steps, share = b.steps - a.steps, a.share - b.share
    if steps <= 0:
        return 0.0
    return steps * machine.alpha / (share * machine.beta) if share > 0 and machine.beta > 0 else math.inf
