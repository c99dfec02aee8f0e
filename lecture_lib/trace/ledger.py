"""A ledger: every operation of this rank inside a block, with the bytes that it has to send.

with ledger() as led:
    dist.all_reduce(x)
print(led.table())
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from lecture_lib.trace.calls import Call, Recorder


@dataclass
class Ledger:
    """What ``ledger()`` counted. Can be returned from a rank.

    calls:  every operation, in the order in which this rank began it
    """

    calls: list[Call] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int | Fraction:
        """By this rank, in all: see ``lecture_lib.trace.calls`` for the accounting."""
        return sum(call.bytes_sent for call in self.calls)

    def totals(self) -> dict[str, tuple[int, int, int | Fraction]]:
        """(calls, elements, bytes sent) by operation, in the order of their first call."""
        totals: dict[str, tuple[int, int, int | Fraction]] = {}
        for call in self.calls:
            calls, elements, sent = totals.get(call.name, (0, 0, 0))
            totals[call.name] = (calls + 1, elements + call.elements, sent + call.bytes_sent)
        return totals

    def table(self) -> str:
        """One line for each operation, and their sum where there are several."""
        rows = [(name, *total) for name, total in self.totals().items()]
        if len(rows) > 1:
            rows.append(("all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))))
        return _table(("operation", "calls", "elements", "bytes sent"), rows)


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    """Count every collective and message that this rank begins in the block, whoever begins it.

    Works in a rank of a World, under torchrun, and with the fake backend. Blocks may be nested: each counts its own. A
    block sees the thread that opened it and the backward pass that this thread starts, and no other thread.
    """
    led = Ledger()
    with Recorder(lambda call, _: led.calls.append(call)):
        yield led


def merged_table(ledgers: list[Ledger]) -> str:
    """The ledgers of all ranks as one table: calls and bytes sent by each rank, by operation.

    ``print(merged_table(world.run(step)))``, where ``step`` returns its ledger.
    """
    names = list(dict.fromkeys(name for led in ledgers for name in led.totals()))
    head = ("operation", "calls", *(f"rank {rank}" for rank in range(len(ledgers))), "bytes sent")
    rows = []
    for name in names:
        totals = [led.totals().get(name, (0, 0, 0)) for led in ledgers]
        sent = [total[2] for total in totals]
        rows.append((name, sum(total[0] for total in totals), *sent, sum(sent)))
    if len(rows) > 1:
        rows.append(("all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))))
    return _table(head, rows)


def _table(head: tuple, rows: list[tuple]) -> str:
    cells = [head, *([row[0], *(_number(value) for value in row[1:])] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    )


def _number(value: int | Fraction) -> str:
    return f"{int(value):,}" if value == int(value) else f"{float(value):,.1f}"
