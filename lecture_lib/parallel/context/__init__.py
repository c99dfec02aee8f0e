"""Context parallelism: one long sequence, split over the ranks, and attention that still sees all of it.

Read in this order:

    sequence.py    who holds which tokens: neighbouring chunks, or zig-zag; in and out again
    block.py       one block of queries and keys, and how blocks are put together: the online softmax
    ring.py        keys and values go around a ring, and each rank's queries meet them block by block
    gather.py      all keys and values brought to every rank: five lines, for comparison
    all_to_all.py  ranks trade their part of the sequence for a part of the heads, and back
    model.py       a whole transformer on split sequences

All of them take this rank's q, k and v, and give this rank's output, the same numbers as one process. T tokens on n
ranks, H query heads over K key and value heads, batch B, head_dim d; S_q = B H T d and S_k = B K T d times the bytes of
a number:

                            forward sends                backward sends    keeps of k and v
    ring_attention          (n-1)/n 2 S_k                (n-1)/n 4 S_k *   2 S_k / n
    all_gather_attention    (n-1)/n 2 S_k                (n-1)/n 2 S_k     2 S_k
    all_to_all_attention    (n-1)/n^2 (2 S_q + 2 S_k)    as much           2 S_k / n

* its gradients travel in float32, so with bfloat16 it is (n-1)/n 6 S_k.
"""

from lecture_lib.parallel.context.all_to_all import all_to_all_attention, heads_of_all_tokens, tokens_of_all_heads
from lecture_lib.parallel.context.block import attend, flash_attend, flash_gradients, gradients, merge
from lecture_lib.parallel.context.gather import all_gather_attention
from lecture_lib.parallel.context.model import attend_to_all, context_parallel
from lecture_lib.parallel.context.ring import ring_attention
from lecture_lib.parallel.context.sequence import (
    blocks,
    blocks_by_rank,
    contiguous,
    positions,
    shard_sequence,
    unshard_sequence,
    zigzag,
)

__all__ = [
    "all_gather_attention",
    "all_to_all_attention",
    "attend",
    "attend_to_all",
    "blocks",
    "blocks_by_rank",
    "context_parallel",
    "contiguous",
    "flash_attend",
    "flash_gradients",
    "gradients",
    "heads_of_all_tokens",
    "merge",
    "positions",
    "ring_attention",
    "shard_sequence",
    "tokens_of_all_heads",
    "unshard_sequence",
    "zigzag",
]
