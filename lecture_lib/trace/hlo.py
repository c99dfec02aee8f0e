"""The collectives of a compiled JAX program, read from its text.

    program = jax.jit(step).lower(*arguments).compile()
    print(hlo_ledger(program.as_text()).table())

The compiler makes one program that every device runs, so nobody has to be watched: what will travel stands in the
text, in XLA's language HLO, one instruction on a line:

    %all-reduce.4 = (f32[64,64]{1,0}, f32[]) all-reduce(%dot.3, %sum.1), replica_groups={{0,4},{1,5}}, to_apply=%add
     name            what comes out          operation  what goes in     which devices talk to each other

One collective may carry several tensors, as this one does. Bytes sent are counted as ``lecture_lib.trace.calls`` counts
them, for S bytes in the whole tensor and groups of n devices:

    all_reduce                   2 (n-1)/n S
    all_gather, all_to_all         (n-1)/n S      S: all that is gathered; all pieces for others
    reduce_scatter                 (n-1)/n S      S: all that is brought
    collective_permute                     S      by a device that sends to another one
    collective_broadcast                   S      as broadcast

Sources: the HLO of JAX 0.10; XLA, "Operation Semantics" (https://openxla.org/xla/operation_semantics), for what each
operation takes and gives.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from lecture_lib.trace.ledger import Ledger, _number

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast")


class Collective(NamedTuple):
    """One collective of a compiled program, as every device that takes part runs it.

    name:        one of KINDS
    groups:      who talks to whom: devices by their place in the mesh, one tuple for each group, all of one size; of
                 a collective_permute: (source, target), one for each message
    shapes:      of the tensors that a device brings, in HLO's notation: ("f32[64,64]", "f32[]")
    elements:    of all of them
    bytes_sent:  by a device, under the accounting above; a fraction where the devices do not divide the bytes
    in_loop:     it stands in a while loop, so that it runs once in each turn
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    shapes: tuple[str, ...]
    elements: int
    bytes_sent: int | Fraction
    in_loop: bool = False


@dataclass
class HloLedger(Ledger):
    """What ``hlo_ledger`` read: a Ledger whose ``calls`` are of class Collective, in the order of the text."""

    def table(self) -> str:
        """The table of a Ledger, and how many of its collectives are in loops, if any."""
        looped = sum(call.in_loop for call in self.calls)
        if not looped:
            return super().table()
        return f"{super().table()}\n{looped} of the calls in a loop, counted once, however often it turns"


def hlo_ledger(text: str) -> HloLedger:
    """The collectives of a compiled program: ``jax.jit(f).lower(*arguments).compile().as_text()``.

    An asynchronous pair, -start and -done, is one collective. What stands in a loop is counted once, and ``in_loop``
    says so; so is what stands in each branch of a conditional. Raises ValueError for a text that is no HLO (such as
    that of ``lower()``, where the compiler has not put in any collective yet), and for a collective whose bytes the
    text does not tell.
    """
    if "HloModule" not in text:
        raise ValueError(
            "hlo_ledger: this is not the text of a compiled program; "
            "pass jax.jit(f).lower(*arguments).compile().as_text()."
        )
    head = re.search("HloModule.*", text)[0]
    devices = math.prod(int(count) for count in re.findall(r"(?:num_partitions|replica_count)=(\d+)", head))
    looped = computations_in_loops(text)
    calls, computation, types = [], "", {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():  # /*index=5*/ in long lists
        if begins := COMPUTATION.match(line):
            computation, types = begins[1], {}
        elif instruction := INSTRUCTION.match(line):
            types[instruction["name"]] = instruction["type"]
            operation = instruction["operation"].removesuffix("-start")
            if operation == "ragged-all-to-all":
                raise ValueError("hlo_ledger: how much a ragged-all-to-all sends is known only when it runs.")
            if (name := operation.replace("-", "_")) in KINDS:
                brought = "".join(types[operand] for operand in re.findall(r"%([\w.-]+)", instruction["operands"]))
                groups = groups_of(instruction["attributes"], devices)
                calls.append(collective(name, brought, groups, computation in looped))
    return HloLedger(calls)


def side_by_side(forms: dict[str, Ledger | dict]) -> str:
    """What several forms of one computation send, as one table: a line for each form and kind of collective.

    A form is a Ledger (of a rank, or of a compiled program), or the counts of torch's ``CommDebugMode``, which knows
    calls but no bytes: ``get_comm_counts()``.
    """
    rows = [("form", "operation", "calls", "elements", "bytes sent")]
    for form, counted in forms.items():
        totals: dict[str, list] = {}
        if isinstance(counted, Ledger):
            for name, total in counted.totals().items():
                before = totals.get(kind_of(name), (0, 0, 0))
                totals[kind_of(name)] = [a + b for a, b in zip(before, total, strict=True)]
        else:
            totals = {kind_of(str(operator)): [calls] for operator, calls in counted.items()}
        for kind, numbers_of_kind in totals.items() or [("nothing", [0, 0, 0])]:
            rows.append((form, kind, *(_number(number) for number in numbers_of_kind), "", "")[:5])
            form = ""
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    align = (str.ljust, str.ljust, str.rjust, str.rjust, str.rjust)
    return "\n".join("  ".join(f(word, w) for f, word, w in zip(align, row, widths, strict=True)) for row in rows)


# ---- reading ---------------------------------------------------------------------------------------------------------

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")  # %region_0.3 (a: f32[], b: f32[]) -> f32[] {
# A type is a shape with its layout, f32[8,64]{1,0:T(8,128)}, or a tuple of types: all up to the last blank before the
# name of an operation and its parenthesis.
INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<operation>[a-z][\w-]*)"
    r"\((?P<operands>[^()]*(?:\([^()]*\)[^()]*)*)\)(?P<attributes>.*)$"
)
SHAPE = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,<= ]*)\]")  # f32[8,64], pred[], bf16[<=8]


def collective(name: str, brought: str, groups: tuple[tuple[int, ...], ...], in_loop: bool) -> Collective:
    """``brought``: the types of what a device brings, one after the other."""
    shapes = SHAPE.findall(brought)
    sizes = [math.prod(int(size) for size in re.findall(r"\d+", dims)) for _, dims in shapes]
    total = Fraction(sum(size * bits(dtype) for size, (dtype, _) in zip(sizes, shapes, strict=True)), 8)  # bytes
    n = len(groups[0])
    match name:
        case "all_reduce":
            sent = 2 * (n - 1) * total / n
        case "all_gather":
            sent = (n - 1) * total  # S is n times what each brings
        case "collective_permute":
            sent = total if any(source != target for source, target in groups) else Fraction(0)
        case "collective_broadcast":
            sent = total
        case _:
            sent = (n - 1) * total / n
    sent = int(sent) if sent.denominator == 1 else sent
    return Collective(name, groups, tuple(f"{d}[{dims}]" for d, dims in shapes), sum(sizes), sent, in_loop)


def bits(dtype: str) -> int:
    """Of one element: f32 has 32, bf16 16, f8e4m3fn 8, s4 4; pred is stored as a byte."""
    return 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])


def groups_of(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Who talks to whom, from one of the forms in which XLA says it.

    {{0,1},{2,3}}                        as it is; {} is all devices
    [2,4]<=[8]                           0 to 7 in 2 rows of 4; with [4,2]T(1,0), a (4, 2) array, transposed first
    mesh['a'=2,'b'=4] {'b'}              0 to 7 as a mesh, the groups along b; 'b':(2)2 is a part of an axis: b as
                                         2 x 2 x 1, the middle one
    mesh[...], device_ids=(0,2,1,3) {'b'}, or device_ids=([2,2]T(1,0))   the same, with devices in another order
    """
    if pairs := re.search(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return lists(pairs[1])
    if explicit := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return lists(explicit[1]) or (tuple(range(devices)),)
    if rows := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return as_tuples(array(rows[2]).reshape(numbers(rows[1])))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", attributes)
    if not mesh:
        raise ValueError(f"hlo_ledger: cannot read which devices talk to each other in: {attributes.strip(', ')}")
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
    along = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh[3])  # (axis, what comes before the part, its size)
    dims, chosen = [], {}
    for axis, size in axes.items():
        # Parts of one axis, by what comes before them, cut it into factors: before, part, after.
        at = 1
        for name, before, part in sorted((a for a in along if a[0] == axis), key=lambda a: int(a[1] or 1)):
            before, part = int(before or 1), int(part or size)
            chosen[(name, before)] = len(dims) + 1
            dims += [before // at, part]
            at = before * part
        dims.append(size // at)
    order = [chosen[(name, int(before or 1))] for name, before, _ in along]
    ids = array(mesh[2] or f"[{math.prod(axes.values())}]").reshape(dims)
    rest = [i for i in range(len(dims)) if i not in order]
    return as_tuples(ids.permute(rest + order).reshape(-1, math.prod(dims[i] for i in order)))


def array(words: str) -> torch.Tensor:
    """ "[4,2]T(1,0)": 0 to 7 as a (4, 2) array, transposed; "0,2,1,3": these."""
    if not words.startswith("["):
        return torch.tensor(numbers(words))
    shape, _, order = words.partition("T")
    ids = torch.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return ids.permute(numbers(order)) if order else ids


def numbers(words: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", words)]


def lists(words: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(numbers(group)) for group in re.findall(r"\{([\d,]*)\}", words))


def as_tuples(ids: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in ids.tolist())


def computations_in_loops(text: str) -> set[str]:
    """Names of the computations that a while loop runs, and of all that these call."""
    used: dict[str, set[str]] = {}
    looped, computation = [], ""
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            computation = begins[1]
        else:
            names = re.findall(r"(\w+)=(?:\{(%[^}]*)\}|%([\w.-]+))", line)
            called = {name for _, many, one in names for name in ([one] if one else re.findall(r"%([\w.-]+)", many))}
            used.setdefault(computation, set()).update(called)
            looped += [one for attribute, _, one in names if attribute in ("body", "condition")]
    reached: set[str] = set()
    while looped:
        if (name := looped.pop()) not in reached:
            reached.add(name)
            looped += used.get(name, ())
    return reached


def kind_of(name: str) -> str:
    """all_gather of "all_gather_single", "c10d_functional.all_gather_into_tensor", "c10d._allgather_base_"."""
    letters = name.split(".")[-1].replace("_", "")
    return next((kind for kind in KINDS if kind.replace("_", "") in letters), name)
