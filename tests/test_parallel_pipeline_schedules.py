"""Schedules on paper: the formulas of the papers, torch's tables, what is refused and why, and simulated runs."""

import csv
import graphlib
import itertools
import random
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import pipelining as theirs

from lecture_lib.parallel import pipeline
from lecture_lib.parallel.pipeline import Action, Cost, Schedule, simulate, validate
from lecture_lib.trace import Event, Timeline

MAKERS = ("naive", "gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1", "zbv", "dualpipe_v")
ACTIONS = "F B I W".split()
SIZES = [(p, m) for p in range(2, 9) for m in (*range(1, 2 * p + 2), 3 * p, 4 * p)]  # m < p, p | m, m > 2p
sizes = st.tuples(st.integers(1, 8), st.integers(1, 20))
times = st.integers(1, 9)


def make(name: str, ranks: int, micro_batches: int, virtual: int = 2) -> Schedule:
    more = {"virtual": virtual} if name == "interleaved" else {}
    return getattr(pipeline, name)(ranks, micro_batches, **more)


def table(*rows: str) -> Schedule:
    """table("0F0 0B0", "1F0 1B0")"""
    return Schedule("mine", tuple(tuple(Action(int(a[0]), a[1], int(a[2:])) for a in row.split()) for row in rows))


def dependencies(schedule: Schedule) -> dict[Action, set[Action]]:
    """What each action has to wait for, written down without the package: the row before it, and its neighbours."""
    there = {action for row in schedule.rows for action in row}
    last = 1 + max(a.stage for a in there) - 1
    graph = {action: set() for action in there}
    for row in schedule.rows:
        for before, after in itertools.pairwise(row):
            graph[after].add(before)
    for stage, kind, i in there:
        action = Action(stage, kind, i)
        if kind == "F" and stage > 0:
            graph[action].add(Action(stage - 1, "F", i))
        if kind in "BI":
            graph[action].add(Action(stage, "F", i))
            if stage < last:
                graph[action] |= {Action(stage + 1, k, i) for k in "BI"} & there
        if kind == "W":
            graph[action].add(Action(stage, "I", i))
    return graph


def can_be_run(schedule: Schedule) -> bool:
    """By definition: complete, each stage on one rank, no cycle."""
    actions = [action for row in schedule.rows for action in row]
    if len(set(actions)) < len(actions):
        return False
    holders = {(action.stage, rank) for rank, row in enumerate(schedule.rows) for action in row}
    if len({stage for stage, _ in holders}) < len(holders):
        return False
    for stage, i in itertools.product(range(schedule.stages), range(schedule.micro_batches)):
        kinds = {kind for kind in ACTIONS if Action(stage, kind, i) in actions}
        if kinds not in ({"F", "B"}, {"F", "I", "W"}):
            return False
    try:
        graphlib.TopologicalSorter(dependencies(schedule)).prepare()
    except graphlib.CycleError:
        return False
    return True


@st.composite
def random_tables(draw) -> Schedule:
    """Any valid table: stages anywhere, each backward pass whole or in halves, actions in any order that can be."""
    ranks, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    stages = draw(st.integers(ranks, ranks + 4))
    rng = random.Random(draw(st.integers(0, 2**32)))
    return random_table(rng, ranks, stages, micro_batches)


def random_table(rng: random.Random, ranks: int, stages: int, micro_batches: int) -> Schedule:
    holder = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(holder)
    actions = []
    for stage, i in itertools.product(range(stages), range(micro_batches)):
        actions += [Action(stage, kind, i) for kind in rng.choice(["FB", "FIW"])]
    graph = dependencies(Schedule("", tuple((action,) for action in actions)))
    rows, done = [[] for _ in range(ranks)], set()
    while len(done) < len(actions):
        action = rng.choice([a for a in actions if a not in done and graph[a] <= done])
        done.add(action)
        rows[holder[action.stage]].append(action)
    return Schedule("random", tuple(map(tuple, rows)))


# ---- the formulas of the papers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("cost", [Cost(), Cost(F=2, I=3, W=4), Cost(F=Fraction(1, 3), I=1, W=Fraction(1, 7))])
def test_the_bubble_of_gpipe_and_1f1b(name, cost):
    for p, m in SIZES:
        run = simulate(make(name, p, m), cost)
        assert run.bubble_over_work == Fraction(p - 1, m)
        assert run.bubble == Fraction(p - 1, m + p - 1)
        assert run.makespan == (m + p - 1) * (cost.F + cost.I + cost.W)


def test_naive_keeps_one_rank_of_p_at_work():
    for p, m in SIZES:
        run = simulate(make("naive", p, m), Cost(F=2, I=1, W=3, send=5))
        assert run.makespan == m * (p * 6 + 2 * (p - 1) * 5)
        assert validate(run.schedule) == (1,) * p


def test_gpipe_holds_all_micro_batches_and_1f1b_no_more_than_ranks_to_come():
    for p, m in SIZES:
        assert validate(make("gpipe", p, m)) == (m,) * p
        assert validate(make("one_f_one_b", p, m)) == tuple(min(m, p - rank) for rank in range(p))


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble(v):
    for p, m in SIZES:
        schedule = make("interleaved", p, m, v)
        run = simulate(schedule, Cost(F=2, I=1, W=3))
        least = Fraction(p - 1, v * m)
        if m % p == 0:
            assert run.bubble_over_work == least
            warm_up = [(v - 1) * p + (2 if v > 1 else 1) * (p - 1 - rank) for rank in range(p)]
            assert validate(schedule) == tuple(min(w + 1, v * m) for w in warm_up)
        else:
            assert run.bubble_over_work >= least  # the paper asks for a multiple of p
        assert schedule.rank_of == tuple(range(p)) * v


def test_one_virtual_stage_is_1f1b():
    for p, m in SIZES:
        assert make("interleaved", p, m, 1).rows == make("one_f_one_b", p, m).rows


def test_zero_bubble_h1():
    for (p, m), (f, i, w) in itertools.product(SIZES, [(1, 1, 1), (3, 2, 1)]):
        schedule = make("zero_bubble_h1", p, m)
        assert validate(schedule) == (min(m, p),) * p  # what rank 0 holds in 1F1B
        if m >= p:  # and W <= F, I, as in the paper
            assert simulate(schedule, Cost(f, i, w)).makespan == m * (f + i + w) + (p - 1) * (f + i - w)


def test_zbv_has_no_bubble_but_the_fill():
    for p, m in SIZES:
        run = simulate(make("zbv", p, m))
        assert max(run.peak_memory) <= 2 * p  # of half-sized stages
        if m >= 2 * p - 1:
            assert run.bubble_within == 0
            assert run.makespan == 6 * m + p - 1
            assert set(run.peak_memory) == {2 * p}


def test_dualpipe_v():
    for p, m in SIZES:
        run = simulate(make("dualpipe_v", p, m))
        assert max(run.peak_memory) <= 2 * p + 1  # DualPipe's table: PP + 1, PP = 2 p stages
        if m >= 2 * p:
            assert run.makespan == 6 * m + p - 1
            assert set(run.peak_memory) == {2 * p + 1}


@pytest.mark.parametrize("name", ["zbv", "dualpipe_v"])
def test_a_v_turns_on_one_rank(name):
    schedule = make(name, 4, 8)
    assert schedule.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    crossings = [m for slots in pipeline.program(schedule) for slot in slots for m in slot.messages]
    assert {(m.source, m.target) for m in crossings} == {(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1}


# ---- torch's tables --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchs_schedule():
    """torch's own schedule of a class for p ranks: made on one rank of a group that is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made = None

    def build(kind, p: int, m: int, stages: list[int] = (0,), total: int | None = None):
        nonlocal made
        if made != p:
            if made is not None:
                dist.destroy_process_group()
            dist.init_process_group("fake", rank=0, world_size=p, store=FakeStore())
            made = p
        wrapped = [theirs.PipelineStage(nn.Identity(), i, total or p, torch.device("cpu")) for i in stages]
        single = kind in (theirs.ScheduleGPipe, theirs.Schedule1F1B)
        return kind(wrapped[0] if single else wrapped, n_microbatches=m, loss_fn=nn.MSELoss())

    yield build
    if made is not None:
        dist.destroy_process_group()


def rows_of(order: dict) -> tuple:
    """torch's table without idle steps and gradient reductions, its overlapped pairs one after the other."""
    parts = {rank: [part for a in row if a for part in (a.sub_actions or (a,))] for rank, row in order.items()}
    found = [[str(part) for part in parts[rank] if part.computation_type.value in ACTIONS] for rank in sorted(parts)]
    return tuple(tuple(row) for row in found)


def texts(schedule: Schedule) -> tuple:
    return tuple(tuple(map(str, row)) for row in schedule.rows)


@pytest.mark.parametrize("name, kind", [("gpipe", theirs.ScheduleGPipe), ("one_f_one_b", theirs.Schedule1F1B)])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_torchs_tables_with_a_stage_a_rank(torchs_schedule, name, kind, p):
    for m in (p, p + 1, 2 * p, 3 * p + 1):  # torch refuses 1F1B with fewer micro-batches than stages
        rows = rows_of(torchs_schedule(kind, p, m)._get_pipeline_order())
        if name == "one_f_one_b":
            # In torch 2.13 the last rank's row, which its runtime does not use, counts forward passes from 1.
            assert [cell for cell in rows[-1] if "F" in cell] == [f"{p - 1}F{i}" for i in range(1, m + 1)]
            rows = (*rows[:-1], tuple(f"{p - 1}{kind}{i}" for i in range(m) for kind in "FB"))
        assert texts(make(name, p, m)) == rows


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_torchs_interleaved_table(torchs_schedule, p, v):
    for m in (p, p + 1, 2 * p, 4 * p):  # torch wants rounds of equal length; p + 1 is one round
        peer = torchs_schedule(theirs.ScheduleInterleaved1F1B, p, m, range(0, p * v, p), p * v)
        assert texts(make("interleaved", p, m, v)) == rows_of(peer.pipeline_order)


def test_torchs_interleaved_table_with_one_stage_a_rank_is_not_1f1b(torchs_schedule):
    """It lets each rank hand on two micro-batches more than the next one, as with several stages: the time is that of
    1F1B, for nearly twice the memory. Ours is 1F1B."""
    rows = rows_of(torchs_schedule(theirs.ScheduleInterleaved1F1B, 4, 8).pipeline_order)
    peer = table(*map(" ".join, rows))
    assert simulate(peer).makespan == simulate(make("interleaved", 4, 8, 1)).makespan
    assert validate(peer) == (7, 5, 3, 1) and validate(make("interleaved", 4, 8, 1)) == (4, 3, 2, 1)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_torchs_zero_bubble_tables(torchs_schedule, p):
    for m in (p, 2 * p, 4 * p):
        peer = torchs_schedule(theirs.ScheduleInterleavedZeroBubble, p, m)
        assert texts(make("zero_bubble_h1", p, m)) == rows_of(peer.pipeline_order)
    for m in (1, p, 2 * p - 1, 2 * p, 4 * p):
        peer = torchs_schedule(theirs.ScheduleZBVZeroBubble, p, m, (0, 2 * p - 1), 2 * p)
        assert texts(make("zbv", p, m)) == rows_of(peer.pipeline_order)
    for m in (2 * p, 2 * p + 1, 4 * p):  # torch refuses fewer
        peer = torchs_schedule(theirs.ScheduleDualPipeV, p, m, (0, 2 * p - 1), 2 * p)
        assert texts(make("dualpipe_v", p, m)) == rows_of(peer.pipeline_order)


@pytest.mark.parametrize(
    "name, kind", [("zbv", theirs.ScheduleZBVZeroBubble), ("dualpipe_v", theirs.ScheduleDualPipeV)]
)
def test_torch_reads_what_we_write_and_we_what_it_writes(torchs_schedule, tmp_path, name, kind):
    peer = torchs_schedule(kind, 4, 8, (0, 7), 8)
    for form in ("compute_only", "compute_comms"):
        peer._dump_csv(tmp_path / "theirs.csv", format=form)
        assert texts(pipeline.load_csv(tmp_path / "theirs.csv")) == texts(make(name, 4, 8))
    ours = make("zbv", 4, 8)
    pipeline.dump_csv(ours, tmp_path / "ours.csv")
    peer._load_csv(tmp_path / "ours.csv", format="compute_only")
    assert rows_of(peer.pipeline_order) == texts(ours)
    assert rows_of(peer.pipeline_order_with_comms) == texts(ours)  # torch could place its sends and receives


@given(random_tables())
def test_a_table_survives_csv(tmp_path_factory, schedule):
    path = tmp_path_factory.mktemp("csv") / "random.csv"
    pipeline.dump_csv(schedule, path)
    assert pipeline.load_csv(path) == schedule


def test_a_cell_that_is_no_action_is_named(tmp_path):
    path = tmp_path / "table.csv"
    for cell in ("0X0", "F0", "0F", "1G3", "0F0 0F1"):
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([["0F0"], ["1F0", cell]])
        with pytest.raises(ValueError, match=f'table.csv, line 2: "{cell}" is no action'):
            pipeline.load_csv(path)


def test_what_a_file_may_hold(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("0F0,(0F1;1B0)OVERLAP_F_B\n\n1F0,,1B0\n\n \n")
    assert texts(pipeline.load_csv(path)) == (("0F0", "0F1", "1B0"), (), ("1F0", "1B0"))  # no ranks at the end
    path.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8-sig")  # as a spreadsheet saves it
    assert texts(pipeline.load_csv(path)) == (("0F0", "0B0"), ("1F0", "1B0"))
    path.write_text("0F0,0B0\n1F0;1B0\n")
    with pytest.raises(ValueError, match='table.csv, line 2: "1F0;1B0" is no action'):
        pipeline.load_csv(path)


# ---- what can be run, and what cannot --------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.sampled_from(MAKERS), sizes, st.integers(1, 4))
def test_every_schedule_that_is_made_can_be_run(name, size, virtual):
    schedule = make(name, *size, virtual)
    assert can_be_run(schedule)
    validate(schedule)
    assert (schedule.ranks, schedule.micro_batches) == size
    assert len({action for row in schedule.rows for action in row}) == sum(map(len, schedule.rows))


@settings(deadline=None)
@given(random_tables())
def test_any_table_that_can_be_run_is_accepted(schedule):
    assert can_be_run(schedule)
    assert validate(schedule) == pipeline.peak_in_flight(schedule)


@settings(deadline=None, max_examples=300)
@given(st.data(), st.sampled_from(MAKERS), st.integers(1, 4), st.integers(1, 6))
def test_a_spoiled_table_is_refused_with_the_reason(data, name, ranks, micro_batches):
    rows = [list(row) for row in make(name, ranks, micro_batches).rows]
    rank = data.draw(st.integers(0, ranks - 1))
    row = rows[rank]
    step = data.draw(st.integers(0, len(row) - 1))
    how = data.draw(st.sampled_from(["drop", "repeat", "swap", "move"]))
    spoiled = row[step]
    if how == "drop":
        del row[step]
    elif how == "repeat":
        row.insert(data.draw(st.integers(0, len(row))), spoiled)
    elif how == "swap":
        other = data.draw(st.integers(0, len(row) - 1))
        row[step], row[other] = row[other], row[step]
    else:
        del row[step]
        rows[data.draw(st.integers(0, ranks - 1))].append(spoiled)
    schedule = Schedule("spoiled", tuple(map(tuple, rows)))
    if how == "drop" and schedule.micro_batches < micro_batches:
        return  # not seen: nothing else says that there was one more micro-batch
    if can_be_run(schedule):
        assert how in ("swap", "move")
        validate(schedule)
    else:
        with pytest.raises(ValueError, match=r"rank \d|every rank|no action"):
            validate(schedule)


@pytest.mark.parametrize(
    "rows, reason",
    [
        ([], "the schedule has no action."),
        (["0F0 0B0", ""], "rank 1 has nothing to do; leave it out, or give it a stage."),
        (["0F0 0B0", "1F0"], "rank 1 lacks 1B0 (or 1I0 and 1W0): micro-batch 0 does not come back through stage 1."),
        (["0F0 0B0", "1F0 1I0"], "rank 1 lacks 1W0: micro-batch 0 does not come back through stage 1."),
        (["0B0", "1F0 1B0"], "rank 0 lacks 0F0: nothing brings micro-batch 0 forward through stage 0."),
        (["0F0 0B0", "2F0 2B0"], "every rank lacks 1F0: nothing brings micro-batch 0 forward through stage 1."),
        (["0F0 0B0 0F0"], "rank 0, step 2: 0F0 is there twice; it was rank 0's step 0."),
        (["0B0 0F0"], "rank 0, step 0: 0B0 comes before 0F0, which is step 1."),
        (["0F0 0W0 0I0"], "rank 0, step 1: 0W0 comes before 0I0, which is step 2."),
        (["0F0 0B0 0W0"], "rank 0, step 2: 0W0 is part of 0B0, which is step 1."),
        (
            ["0F0 0B0", "1F0 1B0 0F1 0B1"],
            "rank 1, step 2: 0F1 is on the wrong rank: stage 0 lives on rank 0, which has 0F0 at step 0. A stage has "
            "one rank.",
        ),
        (["0Q0"], "rank 0, step 0: 0Q0 is of kind 'Q'; the kinds are F, B, I and W."),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            "deadlock: rank 0 waits at step 1 (0B0) for 1B0, which is step 2 of rank 1; rank 1 waits at step 1 (1F1) "
            "for 0F1, which is step 2 of rank 0.",
        ),
        (["1F0 0F0 1B0 0B0"], "deadlock: rank 0 waits at step 0 (1F0) for 0F0, which is step 1 of rank 0."),
    ],
)
def test_the_reason(rows, reason):
    with pytest.raises(ValueError) as error:
        validate(table(*rows))
    assert str(error.value) == reason


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="rank 0, step 0: -1F0 has a negative number"):
        validate(Schedule("mine", ((Action(-1, "F", 0),),)))


def test_with_blocking_sends_1f1b_deadlocks_and_gpipe_does_not():
    for p in range(2, 9):
        validate(make("gpipe", p, 8), buffers=0)
        validate(make("naive", p, 8), buffers=0)
    with pytest.raises(ValueError) as error:
        validate(make("one_f_one_b", 2, 4), buffers=0)
    assert str(error.value) == (
        "deadlock: rank 0 cannot hand over the result of 0F1 (step 1) until rank 1 has come to the action that uses "
        "it; rank 1 cannot hand over the result of 1B0 (step 1) until rank 0 has come to the action that uses it."
    )


@pytest.mark.parametrize("name", MAKERS)
def test_one_buffer_is_enough_for_full_rounds(name):
    for p, rounds in itertools.product(range(1, 9), range(1, 4)):
        validate(make(name, p, rounds * p), buffers=1)


@settings(deadline=None)
@given(random_tables(), st.integers(0, 3))
def test_more_buffers_never_hurt(schedule, buffers):
    def runs(buffers) -> bool:
        try:
            validate(schedule, buffers)
            return True
        except ValueError as error:
            assert str(error).startswith("deadlock: rank ")
            return False

    assert runs(None)
    assert runs(buffers) <= runs(buffers + 1)


@pytest.mark.parametrize("buffers", [-1, 0.5])
def test_buffers_are_counted(buffers):
    with pytest.raises(ValueError, match=f"buffers={buffers}: give how many messages"):
        validate(make("gpipe", 2, 2), buffers)


@pytest.mark.parametrize("name", MAKERS)
def test_a_pipeline_of_nothing_is_refused(name):
    for ranks, micro_batches in ((0, 1), (1, 0), (-1, 2)):
        with pytest.raises(ValueError, match="needs at least one"):
            make(name, ranks, micro_batches)
    for ranks, micro_batches, said in (
        (2, 2.5, "micro_batches=2.5"),
        (2.0, 4, "ranks=2.0"),
        (2, "4", "micro_batches='4'"),
    ):
        with pytest.raises(ValueError, match=f"^{said}: a pipeline needs at least one, and a whole number of them"):
            make(name, ranks, micro_batches)
    with pytest.raises(ValueError, match="virtual=0"):
        pipeline.interleaved(2, 4, virtual=0)


# ---- simulated runs --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(random_tables(), st.data())
def test_simulated_times_are_the_longest_paths(schedule, data):
    """The definition: an action ends when the latest of what it waits for has come, and its own time is over."""
    f, i, w, send = (data.draw(st.lists(times, min_size=schedule.stages, max_size=schedule.stages)) for _ in range(4))
    run = simulate(schedule, Cost(f, i, w, send))
    graph = dependencies(schedule)
    takes = {"F": f, "I": i, "W": w, "B": [a + b for a, b in zip(i, w)]}
    end = {}
    for action in graphlib.TopologicalSorter(graph).static_order():
        comes = [0]
        for before in graph[action]:
            travels = schedule.rank_of[before.stage] != schedule.rank_of[action.stage]
            comes.append(end[before] + (send[before.stage] if travels else 0))
        end[action] = max(comes) + takes[action.kind][action.stage]
    assert {action: e for _, action, _, e in run.bars()} == end
    assert all(e - b == takes[a.kind][a.stage] for _, a, b, e in run.bars())
    assert run.makespan == max(end.values()) - min(row[0] for row in run.begin)


@settings(deadline=None)
@given(random_tables(), st.data())
def test_peak_memory_is_the_most_that_is_held(schedule, data):
    stages = schedule.stages
    whole = data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    kept = [data.draw(st.integers(0, a)) for a in whole]
    peaks = []
    for row in schedule.rows:
        held, peak = {}, 0
        for stage, kind, i in row:
            held[stage, i] = {"F": whole[stage], "I": kept[stage]}.get(kind, 0)
            peak = max(peak, sum(held.values()))
        peaks.append(peak)
    assert pipeline.peak_memory(schedule, whole, kept) == tuple(peaks)
    assert simulate(schedule, Cost(activation=whole, kept_for_w=kept)).peak_memory == tuple(peaks)


def test_time_is_linear_in_the_actions():
    """How often ranks are looked at, over the number of actions, does not grow with the micro-batches."""

    class Counted(tuple):
        looks = 0

        def __len__(self):
            Counted.looks += 1
            return super().__len__()

    def looks_per_action(schedule: Schedule) -> float:
        Counted.looks = 0
        counted = Schedule(schedule.name, tuple(map(Counted, schedule.rows)))
        simulate(counted)
        return Counted.looks / sum(len(row) for row in schedule.rows)

    for name in MAKERS:
        assert looks_per_action(make(name, 8, 128)) <= 1.1 * looks_per_action(make(name, 8, 32))


def test_a_table_that_stops_half_way_is_not_simulated():
    with pytest.raises(ValueError, match=r"cannot be run to its end; validate\(schedule\) says why"):
        simulate(table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))


def test_a_list_of_times_needs_one_for_each_stage():
    with pytest.raises(ValueError, match="F has 3 values, and the schedule has 2 stages"):
        simulate(make("gpipe", 2, 2), Cost(F=[1, 2, 3]))


@pytest.mark.parametrize("rows", [(), ("0F0 0B0", "")])
def test_a_table_with_nothing_to_do_is_not_simulated(rows):
    with pytest.raises(ValueError, match=r"cannot be run to its end; validate\(schedule\) says why"):
        simulate(table(*rows))


def test_a_table_without_a_stage_is_not_simulated():
    with pytest.raises(ValueError, match="mine has 3 stages, and no rank does anything for stage 1"):
        simulate(table("0F0 0B0", "2F0 2B0"))


@pytest.mark.parametrize(
    "cost, said",
    [
        (dict(F=-1), "F=-1: -1 is not a number from 0 on"),
        (dict(I=[1, float("nan")]), r"I=\[1, nan\]: nan is not a number from 0 on"),
        (dict(W=float("inf")), "W=inf: inf is not a number"),
        (dict(F="12"), "F='12': '1' is not a number"),
        (dict(send=-5), "send=-5: -5 is not a number from 0 on"),
        (dict(F=0, I=[0, 0], W=0), "F, I and W are 0 in every stage"),
        (dict(kept_for_w=[1, 5]), "kept_for_w is 5 and activation 1 in stage 1; what is kept is part of it"),
    ],
)
def test_costs_that_cannot_be(cost, said):
    with pytest.raises(ValueError, match=said):
        simulate(make("zero_bubble_h1", 2, 2), Cost(**cost))


def test_a_grid():
    assert simulate(make("one_f_one_b", 2, 2), Cost(I=0)).grid() == (
        "rank 0 | 0F0 0F1  .  0B0  .  0B1\nrank 1 |  .  1F0 1B0 1F1 1B1  ."
    )
    with pytest.raises(ValueError, match="0F0 lasts from 0 to 0.5; a grid needs whole times"):
        simulate(make("one_f_one_b", 2, 2), Cost(F=0.5)).grid()


def test_a_table_prints_as_rows():
    assert str(make("gpipe", 2, 2)) == "rank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1F1 1B0 1B1"


def test_a_measured_run_is_read_from_timelines():
    schedule = make("gpipe", 2, 1)
    lines = [
        Timeline(0, [Event("0F0", 0.0, 1.0), Event("mine", 0.2, 0.3), Event("0B0", 4.0, 6.0)]),
        Timeline(1, [Event("1F0", 1.5, 2.5), Event("1B0", 2.5, 4.0)]),
    ]
    run = pipeline.measured(schedule, lines)
    assert (run.begin, run.end) == (((0.0, 4.0), (1.5, 2.5)), ((1.0, 6.0), (2.5, 4.0)))
    assert run.busy == (3.0, 2.5) and run.makespan == 6.0 and run.bubble == pytest.approx(1 - 5.5 / 12)
    with pytest.raises(ValueError, match="rank 1's timeline has 1 actions of gpipe, whose row has 2"):
        pipeline.measured(schedule, [lines[0], Timeline(1, lines[1].events[:1])])


# ---- messages --------------------------------------------------------------------------------------------------------


def runs_one_message_at_a_time(schedule: Schedule) -> bool:
    """The strictest machine: every rank does its batches and actions in order, and is stuck in a batch until its peers
    have come to theirs. Messages of one batch go together, as in an NCCL group."""
    slots = pipeline.program(schedule)
    at = [0] * schedule.ranks
    through = set()
    while True:
        moved = False
        for rank, mine in enumerate(slots):
            while at[rank] < len(mine) and all(message in through for message in mine[at[rank]].messages):
                at[rank] += 1
                moved = True
        standing = [mine[i].messages if i < len(mine) else [] for mine, i in zip(slots, at)]
        for message in itertools.chain(*standing):
            if message not in through and all(message in standing[r] for r in (message.source, message.target)):
                through.add(message)
                moved = True
        if not moved:
            return all(i == len(mine) for mine, i in zip(slots, at))


@settings(deadline=None)
@given(random_tables())
def test_no_order_of_actions_can_deadlock(schedule):
    assert runs_one_message_at_a_time(schedule)


@pytest.mark.parametrize("name", MAKERS)
def test_no_schedule_can_deadlock(name):
    for p, m in itertools.product(range(1, 6), (1, 3, 8)):
        assert runs_one_message_at_a_time(make(name, p, m))


@settings(deadline=None)
@given(random_tables())
def test_a_message_is_sent_when_it_is_there_and_received_before_it_is_used(schedule):
    crossings = 0
    for rank, slots in enumerate(pipeline.program(schedule)):
        assert tuple(slot.action for slot in slots[:-1]) == schedule.rows[rank] and slots[-1].action is None
        done = set()
        for messages, action in slots:
            for use, source, target in messages:
                assert rank in (source, target) and source != target
                if rank == source:
                    before = [(use.stage - 1, "F")] if use.kind == "F" else [(use.stage + 1, "B"), (use.stage + 1, "I")]
                    assert any((stage, kind, use.micro_batch) in done for stage, kind in before)
                    crossings += 1
                else:
                    done.add(("came", use))
            if action is not None:
                stage, kind, i = action
                neighbour = {"F": stage - 1, "W": -1}.get(kind, stage + 1)
                if 0 <= neighbour < schedule.stages and schedule.rank_of[neighbour] != rank:
                    assert ("came", Action(stage, "F" if kind == "F" else "I", i)) in done
                done.add(action)
    boundaries = sum(a != b for a, b in itertools.pairwise(schedule.rank_of))
    assert crossings == 2 * boundaries * schedule.micro_batches


# ---- cutting ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_heaviest_stage_is_as_light_as_it_can_be(weights, data):
    stages = data.draw(st.integers(1, len(weights)))
    layers = [nn.Identity() for _ in weights]
    weight = dict(zip(layers, weights))
    found = pipeline.cut(layers, stages, weights)
    assert [layer for stage in found for layer in stage] == layers and all(len(stage) for stage in found)
    sums = [sum(weight[layer] for layer in stage) for stage in found]
    ways = [
        [sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights)))]
        for cuts in itertools.combinations(range(1, len(weights)), stages - 1)
    ]
    lightest = min(map(max, ways))
    assert max(sums) == lightest
    assert sum(s * s for s in sums) == min(sum(s * s for s in way) for way in ways if max(way) == lightest)


def test_stages_by_count_and_by_parameters():
    layers = [nn.Linear(n, n, bias=False) for n in (4, 1, 1, 1, 1, 2)]
    assert [len(stage) for stage in pipeline.cut(layers, 3)] == [2, 2, 2]
    assert pipeline.parameters_of(layers) == [16, 1, 1, 1, 1, 4]
    assert [len(stage) for stage in pipeline.cut(layers, 3, pipeline.parameters_of(layers))] == [1, 4, 1]


def test_stages_that_cannot_be_cut():
    layers = [nn.Identity(), nn.Identity()]
    for stages in (0, 3):
        with pytest.raises(ValueError, match=f"2 layers cannot be cut into {stages} stages; ask for 1 to 2"):
            pipeline.cut(layers, stages)
    with pytest.raises(ValueError, match="3 weights for 2 layers"):
        pipeline.cut(layers, 2, [1, 2, 3])
    for wrong in (float("nan"), float("inf"), -1):
        with pytest.raises(ValueError, match=f"layer 1 weighs {wrong}; a weight is a number from 0 on"):
            pipeline.cut(layers, 2, [1, wrong])
