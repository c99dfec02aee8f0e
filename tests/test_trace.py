"""Ledger and timeline: every operation is seen, whoever begins it, with exact bytes."""

import json
import time
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from lecture_lib import World
from lecture_lib.trace import Event, Timeline, chrome_trace, ledger, merged_table, region, timeline, write_chrome_trace

N, S = 4, 16  # ranks; elements that each brings to a collective without a root


def by_name(led):
    return [(call.name, call.elements, call.bytes_sent) for call in led.calls]


def one_of_each():
    x, pieces = torch.ones(S), [torch.ones(S) for _ in range(N)]
    rank = dist.get_rank()
    with ledger() as led:
        dist.all_reduce(x)
        dist.broadcast(x, src=1)
        dist.reduce(x, dst=2)
        dist.all_gather(pieces, x)
        dist.all_gather_single(torch.empty(N * S), x)
        dist.reduce_scatter(x, pieces)
        dist.reduce_scatter_single(x, torch.ones(N * S))
        dist.scatter(x, pieces if rank == 0 else None, src=0)
        dist.gather(x, pieces if rank == 3 else None, dst=3)
        dist.all_to_all_single(torch.empty(S), x)
        dist.barrier()
        dist.monitored_barrier()
    return led


def test_every_collective_is_counted_exactly(world):
    leds = world.run(one_of_each)
    for rank, led in enumerate(leds):
        b = 4 * S
        assert by_name(led) == [
            ("all_reduce", S, 2 * (N - 1) * b // N),
            ("broadcast", S, 0 if rank == 0 else b),  # the ring from root 1 ends at rank 0
            ("reduce", S, 0 if rank == 2 else b),
            ("all_gather", S, (N - 1) * b),
            ("all_gather_single", S, (N - 1) * b),
            ("reduce_scatter", N * S, (N - 1) * b),
            ("reduce_scatter_single", N * S, (N - 1) * b),
            ("scatter", N * S if rank == 0 else S, (N - 1) * b if rank == 0 else 0),
            ("gather", S, 0 if rank == 3 else b),
            ("all_to_all_single", S, (N - 1) * b // N),
            ("barrier", 0, 0),
            ("monitored_barrier", 0, 0),
        ]
        assert {call.group for call in led.calls} == {(0, 1, 2, 3)}
        assert [call.peer for call in led.calls[:3]] == [None, 1, 2] and led.calls[0].dtype == "float32"
        assert led.bytes_sent == sum(call.bytes_sent for call in led.calls)


@pytest.mark.parametrize("elements, sent", [(5, Fraction(30)), (1, 6), (0, 0), (3, 18)])
def test_a_share_that_is_no_whole_number_stays_exact(world, elements, sent):
    def step():
        with ledger() as led:
            dist.all_reduce(torch.ones(elements))
            dist.all_reduce(torch.ones(elements, dtype=torch.uint8))
        return led

    for led in world.run(step):
        assert [call.bytes_sent for call in led.calls] == [sent, Fraction(sent) / 4]


def test_messages_groups_slices_and_uneven_pieces(world):
    def step():
        rank = dist.get_rank()
        pairs = [dist.new_group([1, 3]), dist.new_group([0, 2])]
        x = torch.arange(8, dtype=torch.bfloat16)
        with ledger() as led:
            if rank == 1:
                dist.send(x[2:5], 2)
            if rank == 2:
                dist.recv(x[2:5], 1)
            if rank == 0:
                dist.recv(x)
            if rank == 3:
                dist.send(x, 0)
            dist.all_reduce(x, group=pairs[0] if rank % 2 else pairs[1])
            rows = torch.ones(1 + 2 + 3 + 4, 5)
            dist.all_to_all_single(
                torch.empty(4 * (rank + 1), 5), rows, output_split_sizes=[rank + 1] * 4, input_split_sizes=[1, 2, 3, 4]
            )
        return led

    leds = world.run(step)
    message, reduced, exchanged = leds[1].calls
    assert (message.name, message.peer, message.elements, message.bytes_sent) == ("send", 2, 3, 6)
    assert message.offset == 2 and message.dtype == "bfloat16"
    assert (reduced.group, reduced.bytes_sent) == ((1, 3), 16)
    assert exchanged.bytes_sent == (10 - 2) * 5 * 4
    assert (leds[2].calls[0].name, leds[2].calls[0].peer, leds[2].calls[0].bytes_sent) == ("recv", 1, 0)
    assert (leds[0].calls[0].name, leds[0].calls[0].peer) == ("recv", None)


def test_what_ddp_fsdp_dtensor_and_functional_collectives_do_is_seen(world):
    def step():
        import torch.distributed._functional_collectives as functional
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        torch.manual_seed(0)
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
        with ledger() as of_ddp:
            ddp(torch.ones(2, 8)).sum().backward()
        sharded = torch.nn.Linear(8, 4, bias=False)
        fully_shard(sharded)
        with ledger() as of_fsdp:
            sharded(torch.ones(2, 8)).sum().backward()
        mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
        d = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
        with ledger() as of_dtensor:
            d.redistribute(mesh, [Replicate()]).to_local().sum()
        with ledger() as of_functional:
            functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD).sum()
        return of_ddp, of_fsdp, of_dtensor, of_functional

    for of_ddp, of_fsdp, of_dtensor, of_functional in world.run(step):
        assert by_name(of_ddp) == [("all_reduce", 36, 2 * 3 * 36)]  # weight and bias in one bucket
        assert by_name(of_fsdp) == [("all_gather_single", 8, 3 * 32), ("reduce_scatter_single", 32, 3 * 32)]
        assert by_name(of_dtensor) == [("all_gather_single", 8, 3 * 32)]
        assert by_name(of_functional) == [("all_reduce", 8, 48)]


def test_what_dtensor_does_inside_an_operator_is_seen(world):
    """A sum that is pending must be made before a relu: nobody wrote that all-reduce."""

    def pending_sum():
        from torch.distributed.tensor import DTensor, Partial, init_device_mesh

        mesh = init_device_mesh("cpu", (4,))
        x = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with ledger() as led:
            y = x.relu()
        return [(c.name, c.elements, c.bytes_sent) for c in led.calls], y.full_tensor().tolist()

    assert world.run(pending_sum) == [([("all_reduce", 4, 24)], [4.0] * 4)] * 4


def test_what_a_pipeline_schedule_sends_is_seen(world):
    def step():
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        rank = dist.get_rank()
        stage = PipelineStage(torch.nn.Linear(4, 4), rank, 4, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)

        def run():
            if rank == 0:
                schedule.step(torch.ones(8, 4))
            else:
                schedule.step(target=torch.zeros(8, 4) if rank == 3 else None)

        run()  # the first step also tells the stages each other's shapes
        with ledger() as led:
            run()
        return led

    for rank, led in enumerate(world.run(step)):
        neighbours = (rank > 0) + (rank < 3)  # activations to the right, gradients to the left
        sends = [(call.name, call.bytes_sent) for call in led.calls if call.name == "send"]
        assert sends == [("send", 4 * 4 * 4)] * (2 * neighbours)
        assert sum(call.name == "recv" for call in led.calls) == 2 * neighbours


def test_coalesced_and_object_collectives_are_seen(world):
    def step():
        import torch.distributed._functional_collectives as functional

        parts = [torch.ones(4), torch.ones(8)]
        with ledger() as led:
            dist.all_gather_object([None] * 4, dist.get_rank())
            [t.sum() for t in functional.all_reduce_coalesced(parts, "sum", dist.group.WORLD)]
            [t.sum() for t in functional.reduce_scatter_tensor_coalesced(parts, "sum", [0, 0], dist.group.WORLD)]
        return led

    for led in world.run(step):
        sizes, objects, reduced, scattered = led.calls
        assert sizes.name == objects.name == "all_gather" and sizes.bytes_sent == 3 * 8  # lengths first, then pickles
        assert (reduced.name, reduced.elements, reduced.bytes_sent) == ("all_reduce_coalesced", 12, 2 * 3 * 12)
        assert (scattered.name, scattered.bytes_sent) == ("reduce_scatter_single_coalesced", 3 * 12)


def test_ledgers_nest_and_end_with_their_block(world):
    def step():
        x = torch.ones(4)
        with ledger() as outer:
            dist.all_reduce(x)
            with ledger() as inner:
                dist.all_reduce(x)
        dist.all_reduce(x)
        return len(outer.calls), len(inner.calls)

    assert world.run(step) == [(2, 1)] * 4


def test_tables(world):
    def step():
        with ledger() as led:
            dist.all_reduce(torch.ones(1000))
            dist.all_reduce(torch.ones(1000))
            dist.broadcast(torch.ones(5), 0)
        return led

    leds = world.run(step)
    assert leds[0].table() == (
        "operation   calls  elements  bytes sent\n"
        "all_reduce      2     2,000      12,000\n"
        "broadcast       1         5          20\n"
        "all             3     2,005      12,020"
    )
    assert merged_table(leds) == (
        "operation   calls  rank 0  rank 1  rank 2  rank 3  bytes sent\n"
        "all_reduce      8  12,000  12,000  12,000  12,000      48,000\n"
        "broadcast       4      20      20      20       0          60\n"
        "all            12  12,020  12,020  12,020  12,000      48,060"
    )


def test_sixteen_thousand_ranks_in_one_process():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16384)
    try:
        with FakeTensorMode(), ledger() as led:
            dist.all_reduce(torch.empty(16384))
        assert led.bytes_sent == 2 * 16383 * 4
    finally:
        dist.destroy_process_group()


def test_a_timeline_has_regions_and_every_operation_with_its_end(world):
    def step():
        x = torch.ones(4)
        right, left = (dist.get_rank() + 1) % 4, (dist.get_rank() - 1) % 4
        with timeline() as line:
            with region("outer"):
                with region("inner"):
                    time.sleep(0.02)
                dist.all_reduce(x)
                work = dist.all_reduce(x, async_op=True)
                work.wait()
            pair = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, torch.empty(4), left)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            dist.reduce_scatter_single(torch.empty(1), x)
        return line

    for rank, line in enumerate(world.run(step)):
        assert line.rank == rank
        assert sorted(e.name for e in line.events) == sorted(
            ["outer", "inner", "all_reduce", "all_reduce", "send", "recv", "reduce_scatter_single"]
        )
        by = {event.name: event for event in line.events}
        assert all(event.end >= event.begin for event in line.events)
        assert by["outer"].begin <= by["inner"].begin and by["inner"].end <= by["outer"].end
        assert by["inner"].end - by["inner"].begin >= 0.02 and by["inner"].call is None
        assert by["send"].call.peer == (rank + 1) % 4


def test_the_end_of_what_ddp_does_is_seen_too(world):
    def step():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
        with timeline() as line:
            model(torch.ones(2, 8)).sum().backward()
        return line

    for line in world.run(step):
        (event,) = line.events
        assert event.name == "all_reduce" and event.end > event.begin


def test_a_long_timeline_loses_no_wait(world):
    """An operation that is over before its caller has seen its Work, again and again."""

    def step():
        x = torch.ones(4)
        with timeline() as line:
            for _ in range(200):
                dist.all_reduce(x)
        return len(line.events), all(event.end is not None for event in line.events)

    assert world.run(step) == [(200, True)] * 4


def test_functional_collectives_end_when_somebody_needs_them_and_recv_from_anyone_works(world):
    def step():
        import torch.distributed._functional_collectives as functional

        rank = dist.get_rank()
        with timeline() as line:
            total = functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD) + 1
            if rank == 0:
                assert dist.recv(torch.ones(1)) == 3
            if rank == 3:
                dist.send(torch.ones(1), 0)
        return line, total.tolist()

    for line, total in world.run(step):
        assert total == [5.0] * 8
        assert all(event.end is not None and event.end > event.begin for event in line.events)


def test_clocks_that_differ_are_aligned(world):
    """Ranks whose clocks are hours apart see the same barrier end at the same time."""

    def step():
        shift = 3600.0 * dist.get_rank()
        with timeline(clock=lambda: time.perf_counter() + shift) as line:
            time.sleep(0.05 * dist.get_rank())
            dist.barrier()
        return line

    lines = world.run(step)
    ends = [line.events[0].end for line in lines]
    begins = [line.events[0].begin for line in lines]
    assert max(ends) - min(ends) < 0.5  # of 3,600 seconds that the clocks differ
    assert begins == sorted(begins)


def test_a_region_without_a_timeline_and_a_timeline_without_a_group():
    with region("nothing"):
        pass
    with timeline() as line, region("alone"):
        pass
    assert [event.name for event in line.events] == ["alone"] and line.events[0].end is not None


def test_the_trace_file_is_in_the_trace_event_format(world, tmp_path):
    def step():
        with timeline() as line, region("step"):
            dist.all_reduce(torch.ones(4))
        return line

    lines = world.run(step)
    write_chrome_trace(lines, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == chrome_trace(lines)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(e["name"], e["pid"]) for e in spans} == {(name, r) for name in ("step", "all_reduce") for r in range(4)}
    assert all({"name", "ph", "pid", "tid", "ts", "dur"} <= set(event) and event["dur"] >= 0 for event in spans)
    names = [e for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    assert [e["args"]["name"] for e in names] == [f"rank {r}" for r in range(4)]


def test_an_operation_nobody_waited_for_has_no_end_and_no_length():
    trace = chrome_trace([Timeline(0, [Event("send", 1.0, None)])])
    assert [event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"] == [0]


def test_ledgers_under_torchrun_style_groups():
    """Code that makes its own group: the ledger needs nothing of ours."""

    def step():
        dist.init_process_group("gloo")
        with ledger() as led:
            dist.all_reduce(torch.ones(4))
        return led.bytes_sent

    with World(2, backend=None) as world:
        assert world.run(step) == [16, 16]
