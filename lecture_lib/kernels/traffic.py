"""How many bytes a kernel moves: counted while it runs."""

import contextlib
from dataclasses import dataclass

from lecture_lib.kernels.language import INTERPRETED


@dataclass
class Traffic:
    """Bytes that a kernel asks memory for. A cache may answer some of it: it is what the kernel's code asks, exactly,
    and the same on every machine."""

    loaded: int = 0
    stored: int = 0

    @property
    def total(self) -> int:
        return self.loaded + self.stored

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.loaded + other.loaded, self.stored + other.stored)


@contextlib.contextmanager
def count_traffic():
    """Count what the kernels inside the block load and store.

        with count_traffic() as traffic:
            matmul(a, b, tile=32)
        traffic.loaded, traffic.stored            # bytes

    Every tl.load and tl.store of an interpreted kernel goes through two methods of the interpreter. For the time of the
    block they also count: elements that the mask lets through, times bytes per element.

    Raises RuntimeError where kernels are compiled: a GPU does not tell. Use the formulas there; tests hold both equal.
    """
    if not INTERPRETED:
        raise RuntimeError(
            "traffic is counted by Triton's interpreter, which does not run here: set TRITON_INTERPRET=1 before Python "
            "starts, or use the formula, such as matmul_traffic()."
        )
    from triton.runtime.interpreter import interpreter_builder as interpreter

    traffic = Traffic()
    load, store = interpreter.create_masked_load, interpreter.create_masked_store

    def counting_load(pointers, mask, *rest):
        traffic.loaded += _bytes(pointers, mask)
        return load(pointers, mask, *rest)

    def counting_store(pointers, value, mask, *rest):
        traffic.stored += _bytes(pointers, mask)
        return store(pointers, value, mask, *rest)

    interpreter.create_masked_load, interpreter.create_masked_store = counting_load, counting_store
    try:
        yield traffic
    finally:
        interpreter.create_masked_load, interpreter.create_masked_store = load, store


def _bytes(pointers, mask) -> int:
    bits = pointers.get_element_ty().primitive_bitwidth
    return int(mask.data.sum()) * max(1, bits // 8)  # a bool has 1 bit and takes 1 byte
