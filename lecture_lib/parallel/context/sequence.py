"""Who holds which tokens of a long sequence.

The sequence is cut into 2n chunks, two for each of n ranks. With a causal mask it matters which. A token attends to all
before it, so of the pairs (chunk of queries, chunk of keys) only half have to be computed, and chunk i has i + 1 of
them. For n = 4:

    contiguous   0 1 | 2 3 | 4 5 | 6 7      3, 7, 11, 15 blocks: the last rank does most, and all wait for it
    zigzag       0 7 | 1 6 | 2 5 | 3 4      9, 9, 9, 9: an early chunk and a late one, 2n + 1 blocks on every rank

Zig-zag is how Llama 3 splits its sequences (Llama Team 2024, The Llama 3 Herd of Models, section 3.3.2); Brandon et al.
2023, Striped Attention, balance the ranks by giving them every n-th token.
"""

import functools
import itertools
import numbers
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lecture_lib.parallel.agree import agree, describe, name_of
from lecture_lib.parallel.tensor.moves import gather_from_group, split_to_group

Layout = Callable[[int], list[tuple[int, int]]]  # n ranks -> for each rank the numbers of its two chunks of 2n


def contiguous(n: int) -> list[tuple[int, int]]:
    """[(0, 1), (2, 3), (4, 5), (6, 7)] for 4 ranks."""
    return [(2 * rank, 2 * rank + 1) for rank in range(n)]


def zigzag(n: int) -> list[tuple[int, int]]:
    """[(0, 7), (1, 6), (2, 5), (3, 4)] for 4 ranks."""
    return [(rank, 2 * n - 1 - rank) for rank in range(n)]


def positions(seq: int, group: ProcessGroup | None = None, layout: Layout = zigzag) -> Tensor:
    """Where in the whole sequence of ``seq`` tokens those of this rank stand: int64 (seq / n,). Sends nothing.

    Raises ValueError if seq is not a multiple of 2n.
    """
    return order(seq, dist.get_world_size(group), layout).chunk(dist.get_world_size(group))[dist.get_rank(group)]


def order(seq: int, n: int, layout: Layout = zigzag) -> Tensor:
    """The positions of rank 0's tokens, then of rank 1's, ...: int64 (seq,)"""
    if problem := _wrong_chunks(layout, n):
        raise ValueError(f"{name_of(layout)}: every rank {problem}")
    if seq % (2 * n):
        raise ValueError(
            f"{n} ranks hold 2 chunks each, and {2 * n} chunks cannot share {seq} tokens equally; pad the sequence to "
            f"{seq + -seq % (2 * n)}."
        )
    return torch.arange(seq).view(2 * n, -1)[list(itertools.chain(*layout(n)))].flatten()


def shard_sequence(x: Tensor, dim: int = 1, group: ProcessGroup | None = None, layout: Layout = zigzag) -> Tensor:
    """This rank's tokens of x, which is the same on all ranks: (..., seq, ...) -> (..., seq / n, ...)

    Backward: all-gather, (n-1)/n of the bytes of x. Raises ValueError, the same on every rank, if seq is not a multiple
    of 2n, if x has no such dim, for a layout that does not give each rank two chunks of its own, or if ranks bring
    different shapes, dims or layouts.
    """
    _agree_on_sequence("shard_sequence", x, dim, group, layout)
    by_rank = order(x.shape[dim], dist.get_world_size(group), layout).to(x.device)
    return split_to_group(x.index_select(dim, by_rank), dim, group)


def unshard_sequence(x: Tensor, dim: int = 1, group: ProcessGroup | None = None, layout: Layout = zigzag) -> Tensor:
    """The way back: all tokens, in their order, on every rank. (..., seq / n, ...) -> (..., seq, ...)

    All-gather, (n-1)/n of the bytes of the result. Backward: nothing moves. Raises ValueError as ``shard_sequence``.
    """
    _agree_on_sequence("unshard_sequence", x, dim, group, layout)
    n = dist.get_world_size(group)
    by_rank = order(x.shape[dim] * n, n, layout).to(x.device)
    return gather_from_group(x, dim, group).index_select(dim, by_rank.argsort())


def _agree_on_sequence(who: str, x: Tensor, dim: int, group: ProcessGroup | None, layout: Layout) -> None:
    problem = wrong_layout(layout, group)
    if not -x.dim() <= dim < x.dim():
        problem = f"brought dim={dim} for x of {x.dim()} dimensions; take {-x.dim()} to {x.dim() - 1}."
    facts = [f"x of {describe(x)}", f"dim={dim}, layout={name_of(layout)}", chunks_by_rank(layout, group)]
    agree(who, facts, group, problem)


def chunks_by_rank(layout: Layout, group: ProcessGroup | None) -> str:
    """The fact, for ``agree``: two ranks may mean different layouts by one name."""
    return f"layout({dist.get_world_size(group)}) = {layout(dist.get_world_size(group))}"


def wrong_layout(layout: Layout, group: ProcessGroup | None) -> str | None:
    """The problem, for ``agree``."""
    return _wrong_chunks(layout, dist.get_world_size(group))


def _wrong_chunks(layout: Layout, n: int) -> str | None:
    chunks = layout(n)
    if [len(pair) for pair in chunks] == [2] * n and sorted(itertools.chain(*chunks)) == list(range(2 * n)):
        return None
    return (
        f"brought a layout that gives {n} ranks the chunks {chunks}; each of 0 to {2 * n - 1} has to be there once, "
        "and each rank has two."
    )


# ---- who computes what -----------------------------------------------------------------------------------------------

Block = tuple[slice, slice, bool]  # rows of the queries here, rows of the keys here, whether the diagonal runs through


def blocks(
    queries: tuple[int, int], keys: tuple[int, int], size: int, tile: int, causal: bool = True
) -> Iterator[Block]:
    """The blocks of scores, at most tile x tile, of a rank that holds these two chunks of queries and has got these two
    chunks of keys, ``size`` tokens each. With a causal mask, only those in which some query may see some key."""
    for (i, query_chunk), (j, key_chunk) in itertools.product(enumerate(queries), enumerate(keys)):
        for row, column in itertools.product(range(0, size, tile), repeat=2):
            first_query, first_key = query_chunk * size + row, key_chunk * size + column
            if not causal or first_key <= first_query:
                rows = slice(i * size + row, i * size + min(row + tile, size))
                columns = slice(j * size + column, j * size + min(column + tile, size))
                yield rows, columns, causal and first_key == first_query


def blocks_by_rank(n: int, layout: Layout = zigzag, causal: bool = True) -> list[list[int]]:
    """How many blocks, of one chunk by one chunk, each rank computes at each of the n steps of the ring."""
    chunks = layout(n)
    return [
        [len(list(blocks(chunks[rank], chunks[(rank - step) % n], 1, 1, causal))) for step in range(n)]
        for rank in range(n)
    ]


# ---- before attention ------------------------------------------------------------------------------------------------


def agreed(attention):
    """Before anything is sent, the ranks compare what they bring: a few bytes, which the ledger leaves out.

    The attention alone, without it, is ``ring_attention.__wrapped__``.
    """

    @functools.wraps(attention)
    def checked(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = True,
        group: ProcessGroup | None = None,
        layout: Layout = zigzag,
        **options,
    ) -> Tensor:
        facts = [f"{name} of {describe(x)}" for name, x in (("q", q), ("k", k), ("v", v))]
        every = {"causal": causal, "layout": name_of(layout), **options}
        facts.append(", ".join(f"{name}={value}" for name, value in every.items()))
        problem = _problem(q, k, v, **options) or wrong_layout(layout, group)
        agree(attention.__name__, [*facts, chunks_by_rank(layout, group)], group, problem)
        return attention(q, k, v, causal, group, layout, **options)

    return checked


def _problem(q: Tensor, k: Tensor, v: Tensor, tile: int | None = None) -> str | None:
    shapes = f"brought q, k, v of shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape != v.shape or len({q.dtype, k.dtype, v.dtype}) > 1:
        return f"{shapes}; they have to be (batch, heads, seq / n, head_dim), k and v alike, all of one dtype."
    if not q.is_floating_point():
        return (
            f"brought q, k, v of {str(q.dtype).removeprefix('torch.')}; attention takes float32, bfloat16 and the like."
        )
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        return f"{shapes}; q and k may differ in the number of heads, and in nothing else."
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"brought {q.shape[1]} query heads, which cannot share {k.shape[1]} key and value heads equally."
    if problem := not_two_chunks(q):
        return problem
    if tile is not None and (not isinstance(tile, numbers.Integral) or tile < 1):
        return f"asked for tile={tile}; a block has a whole number of queries and keys, at least 1. None chooses one."
    return None


def not_two_chunks(q: Tensor) -> str | None:  # (batch, heads, seq / n, head_dim)
    if q.shape[2] % 2 or q.shape[2] == 0:
        return f"brought {q.shape[2]} tokens, which are not 2 equal chunks; cut the sequence with shard_sequence()."
    return None
