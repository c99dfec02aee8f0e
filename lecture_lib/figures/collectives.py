"""What each collective does, in the fewest words that a computer understands.

A state is what all ranks hold: a row for each rank, a place for each element, None where a rank holds nothing. A
collective takes the state before to the state after. Elements remember the ranks that they came from, so a picture
knows how to colour them and never needs to be told.
"""

from functools import reduce as fold
from operator import add
from typing import NamedTuple


class Element(NamedTuple):
    value: int
    ranks: tuple[int, ...]  # where it came from; a sum came from several

    def __add__(self, other: "Element") -> "Element":
        return Element(self.value + other.value, self.ranks + other.ranks)


Row = list[Element | None]
State = list[Row]


def total(x: State) -> Row:
    return [fold(add, column) for column in zip(*x)]


def nothing(x: State) -> Row:
    return [None] * len(x[0])


def only(place: int, row: Row) -> Row:
    """The piece of a row at one place. A picture keeps it there, so that one sees where in the whole it belongs."""
    return [element if i == place else None for i, element in enumerate(row)]


# One rank has something for all, or wants something of all. That rank is called the root.


def broadcast(x: State, root: int = 0) -> State:
    return [x[root] for _ in x]


def scatter(x: State, root: int = 0) -> State:
    return [only(rank, x[root]) for rank in range(len(x))]


def gather(x: State, root: int = 0) -> State:
    return [collected(x) if rank == root else nothing(x) for rank in range(len(x))]


def reduce(x: State, root: int = 0) -> State:
    return [total(x) if rank == root else nothing(x) for rank in range(len(x))]


# Everyone gives and everyone gets.


def all_gather(x: State) -> State:
    return [collected(x) for _ in x]


def reduce_scatter(x: State) -> State:
    return [only(rank, total(x)) for rank in range(len(x))]


def all_reduce(x: State) -> State:
    return [total(x) for _ in x]


def all_to_all(x: State) -> State:
    return [[x[source][rank] for source in range(len(x))] for rank in range(len(x))]


def collected(x: State) -> Row:
    """Rank r's piece at place r."""
    return [x[rank][rank] for rank in range(len(x))]


# Messages between two ranks.


def send_recv(x: State, source: int = 0, target: int = 1) -> State:
    return [x[source] if rank == target else x[rank] for rank in range(len(x))]


def batch_send_recv(x: State) -> State:
    """Everyone sends to the next rank and receives from the one before, all at once."""
    return [x[rank - 1] for rank in range(len(x))]


# What the ranks hold before, in the pictures and in notebook 02. Where data is moved, the tens say which rank an
# element came from and the ones say its place; where it is added up, small numbers keep the sums easy to do in one's
# head.


def everyone(ranks: int = 4) -> State:
    """torch.arange(4) + 10 * rank"""
    return [[Element(place + 10 * rank, (rank,)) for place in range(ranks)] for rank in range(ranks)]


def addends(ranks: int = 4) -> State:
    """torch.arange(4) + rank"""
    return [[Element(place + rank, (rank,)) for place in range(ranks)] for rank in range(ranks)]


def root_only(ranks: int = 4, root: int = 0) -> State:
    """torch.arange(4) on the root"""
    return [row if rank == root else [None] * ranks for rank, row in enumerate(addends(ranks))]


def pieces(ranks: int = 4) -> State:
    """torch.tensor([10 * rank])"""
    return [only(rank, [Element(10 * rank, (rank,))] * ranks) for rank in range(ranks)]


def values(row: Row) -> list[int]:
    return [element.value for element in row if element is not None]


def in_words(x: State, verb: str = "") -> str:
    """'rank 0 [0, 1, 2, 3], ranks 1, 2 and 3 nothing': ranks that hold the same are named together."""
    groups: dict[str, list[int]] = {}
    for rank, row in enumerate(x):
        groups.setdefault(str(values(row) or "nothing"), []).append(rank)
    verbs = {"": ("", ""), "hold": (" holds", " hold")}[verb]
    if len(groups) == 1:
        return f"every rank{verbs[0]} {next(iter(groups))}"
    parts = []
    for held, ranks in groups.items():
        *most, last = map(str, ranks)
        who = f"ranks {', '.join(most)} and {last}{verbs[1]}" if most else f"rank {last}{verbs[0]}"
        parts.append(f"{who} {held}")
    return ", ".join(parts)
