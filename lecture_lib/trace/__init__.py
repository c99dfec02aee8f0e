"""What a run did: bytes, messages and time of every collective, counted inside a rank.

Read in this order:

    calls.py      one c10d operation as a record: name, group, dtype, elements, bytes that this rank has to send
    ledger.py     with ledger() as led: every operation in the block; led.calls, led.bytes_sent, led.table()
    timeline.py   with timeline() as line: when each one began and ended, on one clock for all ranks
    hlo.py        the collectives of a compiled JAX program, read from its text: hlo_ledger(text); side_by_side(forms)
    memory.py     with memory(module, optimizer) as held: bytes of parameters, gradients, optimizer state, activations
"""

from lecture_lib.trace.calls import Call, unrecorded
from lecture_lib.trace.hlo import Collective, HloLedger, hlo_ledger, side_by_side
from lecture_lib.trace.ledger import Ledger, ledger, merged_table
from lecture_lib.trace.memory import Memory, memory
from lecture_lib.trace.timeline import Event, Timeline, chrome_trace, region, timeline, write_chrome_trace

__all__ = [
    "Call",
    "Collective",
    "Event",
    "HloLedger",
    "Ledger",
    "Memory",
    "Timeline",
    "chrome_trace",
    "hlo_ledger",
    "ledger",
    "memory",
    "merged_table",
    "region",
    "side_by_side",
    "timeline",
    "unrecorded",
    "write_chrome_trace",
]
