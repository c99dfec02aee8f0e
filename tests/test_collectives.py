"""The collectives against torch.distributed, on 1 to 9 ranks, any dtype, size and operator; and their exact cost."""

import functools
import inspect
import itertools
import math
import os
import re

import pytest
import torch
import torch.distributed as dist

from lecture_lib import RankError
from lecture_lib import collectives as c
from lecture_lib.collectives.cost import cost
from lecture_lib.trace import ledger

SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))
ALL_REDUCE = [name for name in c.__all__ if name.endswith("all_reduce")]
ALL_GATHER = [name for name in c.__all__ if name.endswith("all_gather")]
REDUCE_SCATTER = [name for name in c.__all__ if name.endswith("reduce_scatter")]
REDUCE = [name for name in c.__all__ if name.endswith("_reduce") and name not in ALL_REDUCE]
BROADCAST = [name for name in c.__all__ if name.endswith("broadcast")]
SCATTER = [name for name in c.__all__ if name.endswith("_scatter") and name not in REDUCE_SCATTER]
GATHER = [name for name in c.__all__ if name.endswith("_gather") and name not in ALL_GATHER]
ALL_TO_ALL = [name for name in c.__all__ if name.endswith("all_to_all")]


@pytest.fixture(scope="module", params=range(1, 10))
def sized(request, worlds):
    """A world of each size from 1 to 9."""
    return worlds[request.param]


def data(shape, dtype, rank=None):
    """Ones and twos, different on every rank: sums and products are exact in any order, in bfloat16 too."""
    rank = dist.get_rank() if rank is None else rank
    count = math.prod(shape)
    return ((torch.arange(count) * 5 // 3 + rank) % 2 + 1).to(dtype).view(shape)


def node_sizes(n):
    return [k for k in range(1, n + 1) if n % k == 0]


def check_all(cases):
    """Every collective on this rank, for each case; returns what differs from torch.distributed."""
    wrong = []

    def same(what, ours, theirs):
        if not torch.equal(ours, theirs):
            wrong.append((what, ours.tolist(), theirs.tolist()))

    n, rank = dist.get_world_size(), dist.get_rank()
    for shape, dtype, op, root in cases:
        root %= n
        where = f"{shape} {dtype} {op} root {root}"
        x = data(shape, dtype)
        theirs = x.clone()
        dist.all_reduce(theirs, op)
        for name in ALL_REDUCE:
            for extra in [{"ranks_per_node": k} for k in node_sizes(n)] if "hierarchical" in name else [{}]:
                ours = x.clone()
                getattr(c, name)(ours, op, **extra)
                same(f"{name} {extra} {where}", ours, theirs)
        for name in REDUCE:
            ours = x.clone()
            getattr(c, name)(ours, root, op)
            same(f"{name} {where}", ours, theirs if rank == root else x)
        for name in BROADCAST:
            ours = x.clone()
            getattr(c, name)(ours, root)
            same(f"{name} {where}", ours, data(shape, dtype, root))
        whole = torch.stack([data(shape, dtype, r) for r in range(n)])  # (n, *shape)
        for name in GATHER:
            parts = [torch.empty_like(x) for _ in range(n)] if rank == root else None
            getattr(c, name)(x, parts, root)
            if rank == root:
                same(f"{name} {where}", torch.stack(parts), whole)
        for name in SCATTER:
            ours = torch.empty_like(x)
            getattr(c, name)(ours, list(whole) if rank == root else None, root)
            same(f"{name} {where}", ours, whole[rank])
        for name in ALL_GATHER:
            for extra in [{"ranks_per_node": k} for k in node_sizes(n)] if "hierarchical" in name else [{}]:
                ours = x.new_empty(n, *shape)
                getattr(c, name)(ours, x, **extra)
                same(f"{name} {extra} {where}", ours, whole)
        big = data((n, *shape), dtype)
        theirs = big.clone()
        dist.all_reduce(theirs, op)
        for name in REDUCE_SCATTER:
            ours, before = torch.empty_like(x), big.clone()
            getattr(c, name)(ours, big, op)
            same(f"{name} {where}", ours, theirs[rank])
            same(f"{name} {where}, its input", big, before)
        for name in ALL_TO_ALL:
            ours = torch.empty_like(big)
            getattr(c, name)(ours, big)
            same(f"{name} {where}", ours, torch.stack([data((n, *shape), dtype, r)[rank] for r in range(n)]))
    return wrong


SHAPES = [(0,), (1,), (2,), (5,), (8,), (13,), (64,), (3, 5), (2, 0, 3), ()]
FLOATS = torch.float32, torch.float64, torch.bfloat16, torch.float16
INTEGERS = torch.int64, torch.int32, torch.int8, torch.uint8
DTYPES = {SUM: FLOATS + INTEGERS, MIN: INTEGERS + FLOATS, MAX: FLOATS + INTEGERS, PRODUCT: FLOATS, AVG: [torch.float64]}


def test_equal_to_torch_distributed(sized):
    """Every operator on each number of ranks; the next shape, dtype and root on the next number."""
    n = sized.size
    cases = [
        (SHAPES[(n + 3 * i) % len(SHAPES)], dtypes[(n + i) % len(dtypes)], op, n + i)
        for i, (op, dtypes) in enumerate(DTYPES.items())
    ]
    for wrong in sized.run(check_all, cases):
        assert not wrong, wrong[0]


def test_all_to_all_with_uneven_pieces(world):
    def step(name):
        n, rank = dist.get_world_size(), dist.get_rank()
        rows = [(rank + 2 * to) % 3 for to in range(n)]
        expected = [(at + 2 * rank) % 3 for at in range(n)]
        x = torch.arange(sum(rows) * 2).view(-1, 2) + 100 * rank
        ours, theirs = x.new_empty(sum(expected), 2), x.new_empty(sum(expected), 2)
        getattr(c, name)(ours, x, expected, rows)
        dist.all_to_all_single(theirs, x, expected, rows)
        return torch.equal(ours, theirs)

    for name in ALL_TO_ALL:
        assert world.run(step, name) == [True] * 4


def test_explicit_equal_pieces_go_with_implied_ones(world):
    def step():
        splits = [2, 2, 2, 2] if dist.get_rank() == 1 else None
        x, out = torch.arange(8.0) + 10 * dist.get_rank(), torch.empty(8)
        c.pairwise_all_to_all(out, x, splits, splits)
        return out.tolist()

    assert world.run(step)[1] == [2, 3, 12, 13, 22, 23, 32, 33]


def test_tensors_that_require_grad_and_booleans(world):
    def step():
        x = torch.ones(4, requires_grad=dist.get_rank() == 1)
        for name in ALL_REDUCE:
            y = x.clone().detach().requires_grad_(x.requires_grad)
            getattr(c, name)(y)
            assert y.tolist() == [4.0] * 4, name
        any_of_them = torch.tensor([dist.get_rank() == 2, False])
        c.ring_all_reduce(any_of_them, MAX)
        return any_of_them.tolist()

    assert world.run(step) == [[True, False]] * 4


def test_groups_with_global_roots(world):
    def step():
        odd = dist.new_group([3, 1])
        x = torch.tensor([float(dist.get_rank())])
        if dist.get_rank() % 2:
            for name in ALL_REDUCE:
                y = x.clone()
                getattr(c, name)(y, group=odd)
                assert y.item() == 4, name
            for name in BROADCAST:
                y = x.clone()
                getattr(c, name)(y, src=3, group=odd)
                assert y.item() == 3, name
            for name in REDUCE:
                y = x.clone()
                getattr(c, name)(y, dst=3, group=odd)
                assert y.item() == (4 if dist.get_rank() == 3 else 1), name
        return "done"

    assert world.run(step) == ["done"] * 4


# ---- exact cost ------------------------------------------------------------------------------------------------------


def costs(count):
    """(messages, elements) that this rank sends, by collective. ``count`` elements go into an all-reduce."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(count)
    piece, parts = torch.ones(count // n), [torch.ones(count // n) for _ in range(n)]
    calls = {
        **{name: lambda f: f(x) for name in ALL_REDUCE + REDUCE + BROADCAST},
        **{name: lambda f: f(x, piece) for name in ALL_GATHER},
        **{name: lambda f: f(piece, x) for name in REDUCE_SCATTER},
        **{name: lambda f: f(piece, parts if rank == 0 else None) for name in SCATTER + GATHER},
        **{name: lambda f: f(torch.empty_like(x), x) for name in ALL_TO_ALL},
    }
    found = {}
    for name, call in calls.items():
        with ledger() as led:
            function = getattr(c, name)
            call(functools.partial(function, ranks_per_node=2 if n % 2 == 0 else n) if "hier" in name else function)
        sent = [one for one in led.calls if one.name == "send"]
        assert len(sent) + sum(one.name == "recv" for one in led.calls) == len(led.calls), led.table()
        found[name] = (len(sent), led.bytes_sent // 4)
    return found


def test_messages_and_bytes_are_those_of_the_docstrings(sized):
    n = sized.size
    if n == 1:
        assert all(sent == (0, 0) for sent in sized.run(costs, 8)[0].values())
        return
    count = 16 * n * n
    by_rank = sized.run(costs, count)
    for name in c.__all__:
        model = cost(name, n, (2 if n % 2 == 0 else n) if "hierarchical" in name else None)
        messages, elements = map(sum, zip(*(costs[name] for costs in by_rank), strict=True))
        assert (messages, elements) == (model.messages, pytest.approx(model.total * count)), name
    S, share, log = count, (n - 1) * count // n, (n - 1).bit_length()

    def each(name):
        return [costs[name] for costs in by_rank]

    def total(name):
        return tuple(map(sum, zip(*each(name), strict=True)))

    assert each("naive_broadcast") == [(n - 1, (n - 1) * S)] + [(0, 0)] * (n - 1)
    assert each("naive_reduce") == [(0, 0)] + [(1, S)] * (n - 1)
    assert each("naive_all_reduce") == [(n - 1, (n - 1) * S)] + [(1, S)] * (n - 1)
    assert each("naive_scatter") == [(n - 1, share)] + [(0, 0)] * (n - 1)
    assert each("naive_gather") == [(0, 0)] + [(1, S // n)] * (n - 1)
    assert each("naive_all_gather") == [(n - 1, (n - 1) * S)] + [(1, S // n)] * (n - 1)
    assert each("naive_reduce_scatter") == [(n - 1, share)] + [(1, S)] * (n - 1)
    for name in ALL_TO_ALL:
        assert each(name) == [(n - 1, share)] * n
    assert each("ring_all_reduce") == [(2 * (n - 1), 2 * share)] * n
    assert each("ring_reduce_scatter") == each("ring_all_gather") == [(n - 1, share)] * n
    assert each("ring_broadcast") == [(n, S)] * (n - 1) + [(0, 0)]
    assert each("ring_reduce") == [(0, 0)] + [(n, S)] * (n - 1)
    assert each("bidirectional_ring_all_reduce") == [(4 * (n - 1), 2 * share)] * n
    assert each("bidirectional_ring_reduce_scatter") == [(2 * (n - 1), share)] * n
    assert each("bidirectional_ring_all_gather") == [(2 * (n - 1), share)] * n
    assert each("tree_broadcast")[0] == (log, log * S) and total("tree_broadcast") == (n - 1, (n - 1) * S)
    assert each("tree_reduce") == [(0, 0)] + [(1, S)] * (n - 1)
    assert total("tree_all_reduce") == (2 * (n - 1), 2 * (n - 1) * S) and each("tree_all_reduce")[0] == (log, log * S)
    assert each("tree_scatter")[0] == (log, share) and total("tree_scatter")[0] == n - 1
    assert total("tree_gather")[0] == n - 1 and total("tree_gather")[1] <= n * log * S // n // 2 + S
    assert each("recursive_doubling_all_gather") == [(log, share)] * n
    k = 2 if n % 2 == 0 else n  # ranks a node
    m = n // k
    assert each("hierarchical_all_reduce") == [(2 * (k - 1) + 2 * (m - 1), 2 * share)] * n
    assert each("hierarchical_all_gather") == [(m - 1 + m * (k - 1), share)] * n
    p = 1 << (n.bit_length() - 1)
    if n == p:
        assert each("recursive_doubling_all_reduce") == [(log, log * S)] * n
        assert each("halving_doubling_all_reduce") == [(2 * log, 2 * share)] * n
        assert each("recursive_halving_reduce_scatter") == [(log, share)] * n
    else:
        folded, k = n - p, p.bit_length() - 1
        expected = [(1, S), (k + 1, (k + 1) * S)] * folded + [(k, k * S)] * (n - 2 * folded)
        assert each("recursive_doubling_all_reduce") == expected
        assert total("halving_doubling_all_reduce") == (2 * k * p + 2 * folded, 2 * (p - 1) * S + 2 * folded * S)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 29])
def test_all_ranks_together_send_as_much_whatever_the_size(world, count):
    def step():
        sent = {}
        for name in ("ring_all_reduce", "bidirectional_ring_all_reduce", "hierarchical_all_reduce"):
            with ledger() as led:
                getattr(c, name)(torch.ones(count))
            sent[name] = led.bytes_sent
        return sent

    by_rank = world.run(step)
    for name in by_rank[0]:
        assert sum(sent[name] for sent in by_rank) == 2 * 3 * 4 * count


def test_each_docstring_states_what_is_sent_and_each_algorithm_is_short():
    for name in c.__all__:
        function = getattr(c, name)
        text = inspect.getdoc(function)
        assert re.search(r"\bS\b", text) and ("message" in text or "steps" in text), name
        assert len(inspect.getsource(function.__wrapped__).splitlines()) <= 40, name


# ---- bad input -------------------------------------------------------------------------------------------------------


def bad_shapes():
    c.ring_all_reduce(torch.ones(5 if dist.get_rank() == 2 else 4))


def bad_dtype():
    c.tree_broadcast(torch.ones(4, dtype=torch.float64 if dist.get_rank() == 3 else torch.float32))


def average_of_integers():
    c.ring_all_reduce(torch.ones(4, dtype=torch.int64), AVG)


def unknown_operator():
    c.ring_all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.BAND)


def not_contiguous():
    x = torch.ones(4, 4)
    c.halving_doubling_all_reduce(x.t() if dist.get_rank() == 1 else x)


def different_collectives():
    (c.ring_all_reduce if dist.get_rank() else c.tree_all_reduce)(torch.ones(4))


def different_roots():
    c.tree_broadcast(torch.ones(4), src=dist.get_rank() // 2)


def wrong_output():
    c.ring_all_gather(torch.ones(15), torch.ones(4))


def wrong_input():
    c.ring_reduce_scatter(torch.ones(4), torch.ones(15))


def no_list():
    c.naive_scatter(torch.ones(4), None)


def no_tensor():
    c.ring_all_reduce([1, 2])


def uneven_rows():
    c.pairwise_all_to_all(torch.ones(6, 2), torch.ones(6, 2))


def pieces_that_do_not_fit():
    c.pairwise_all_to_all(torch.ones(4), torch.ones(4), [1, 1, 1, 1], [2, 0, 1, 1])


def bad_root():
    c.ring_broadcast(torch.ones(4), src=4)


def rows_of_different_width():
    width = 3 if dist.get_rank() else 2
    c.naive_all_to_all(torch.empty(4, width), torch.ones(4, width), [1] * 4, [1] * 4)


def no_rows():
    c.pairwise_all_to_all(torch.tensor(1.0), torch.tensor(1.0))


def dtype_that_cannot_be_added():
    c.ring_all_reduce(torch.ones(4).to(torch.float8_e4m3fn))


def misspelt():
    c.ring_all_reduce(torch.ones(4), **({"operator": SUM} if dist.get_rank() == 1 else {}))


def list_of_numbers():
    c.tree_gather(torch.ones(1), [1, 2, 3, 4] if dist.get_rank() == 0 else None)


def other_nodes():
    os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_rank() < 2 else "1"
    try:
        c.hierarchical_all_reduce(torch.ones(4))
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = "4"


def bad_nodes():
    c.hierarchical_all_reduce(torch.ones(4), ranks_per_node=3)


def device_mix():
    c.naive_all_gather(torch.ones(16, device="meta"), torch.ones(4))


@pytest.mark.parametrize(
    "mistake, says",
    [
        (bad_shapes, "rank 2 called ring_all_reduce(float32[5] on cpu, op=RedOpType.SUM), and rank 0 called"),
        (bad_dtype, "rank 3 called tree_broadcast(float64[4] on cpu, src=0), and rank 0"),
        (average_of_integers, "rank 0 asked for the average of int64[4] on cpu; AVG needs a floating-point tensor"),
        (unknown_operator, "SUM, AVG, MIN, MAX and PRODUCT exist here"),
        (not_contiguous, "rank 1 brought tensor of shape [4, 4] and strides [1, 4], which is not contiguous"),
        (different_collectives, "rank 0 called tree_all_reduce(float32[4] on cpu"),
        (different_roots, "the ranks disagree"),
        (
            wrong_output,
            "rank 0 brought an output of 15 elements for an input of 4; with 4 ranks the output needs 4 times",
        ),
        (wrong_input, "with 4 ranks the input needs 4 times"),
        (no_list, "rank 0 is src and brought a scatter_list of 0 tensors; it needs one for each of 4 ranks"),
        (no_tensor, "rank 0 brought tensor of type list; it needs a tensor"),
        (uneven_rows, "brought an input of 6 rows, which 4 ranks cannot share equally"),
        (pieces_that_do_not_fit, "rank 0 of the group sends 2 rows to rank 0, which expects 1"),
        (bad_root, "named src=4, which is not in the group [0, 1, 2, 3]"),
        (bad_nodes, "rank 0 asked for 3 ranks to a node; ranks_per_node must divide the 4 ranks"),
        (other_nodes, "the ranks disagree: rank 2 called hierarchical_all_reduce(float32[4] on cpu"),
        (rows_of_different_width, "rank 0 called naive_all_to_all(float32[rows, 2] on cpu, float32[rows, 2] on cpu)"),
        (no_rows, "brought an input without rows"),
        (dtype_that_cannot_be_added, "which torch cannot do there"),
        (misspelt, "rank 1 called it wrongly: got an unexpected keyword argument 'operator'"),
        (list_of_numbers, "rank 0 brought arguments that cannot be right"),
        (device_mix, "all tensors of a call need one dtype and one kind of device"),
    ],
)
def test_a_mistake_is_one_clear_error_on_every_rank(world, mistake, says):
    def step():
        try:
            mistake()
        except ValueError as error:
            return str(error)

    pids = world.pids
    messages = world.run(step)
    assert len(set(messages)) == 1 and says in messages[0] and "\n" not in messages[0], messages
    x = world.run(lambda: (x := torch.ones(3), c.ring_all_reduce(x))[0])
    assert [y.tolist() for y in x] == [[4.0] * 3] * 4 and world.pids == pids


def test_a_rank_outside_the_group_is_told_so_and_the_others_finish(world):
    def step():
        pair = dist.new_group([0, 2])
        x = torch.ones(2)
        try:
            c.ring_all_reduce(x, group=pair)
        except ValueError as error:
            return str(error)
        return x.tolist()

    inside, outside = [2.0, 2.0], "is not in the group [0, 2]"
    results = world.run(step)
    assert results[0] == results[2] == inside and all(outside in results[r] for r in (1, 3))


def test_the_agreement_is_not_in_the_ledger(world):
    def step():
        with ledger() as led:
            c.ring_all_reduce(torch.ones(8))
        with ledger() as alone:
            c.ring_all_reduce.__wrapped__(torch.ones(8))
        return led.calls == alone.calls

    assert world.run(step) == [True] * 4


def test_ranks_get_the_same_bits_in_floating_point(world):
    """However the sum is rounded, all ranks round it alike."""

    def step():
        torch.manual_seed(dist.get_rank())
        x = torch.randn(1001)
        results = {}
        for name in ALL_REDUCE:
            y = x.clone()
            getattr(c, name)(y)
            results[name] = y
        return results

    by_rank = world.run(step)
    for name, (a, b) in itertools.product(ALL_REDUCE, itertools.combinations(range(4), 2)):
        assert torch.equal(by_rank[a][name], by_rank[b][name]), name


def test_a_missing_rank_ends_with_an_explanation(world):
    def step():
        if dist.get_rank() != 1:
            c.ring_all_reduce(torch.ones(4))

    with pytest.raises(RankError, match="rank 1 returned"):
        world.run(step)
