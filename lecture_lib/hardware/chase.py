"""Follow pointers on a GPU with one thread, so that each load waits for the one before. Needs Triton."""

import triton
import triton.language as tl


@triton.jit
def chase(table, out, steps):
    """``steps`` times: the number that was read says where to read next."""
    position = tl.load(out)
    for _ in range(steps):
        position = tl.load(table + position, cache_modifier=".cg")  # .cg passes by the L1 cache
    tl.store(out, position)
