"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through all of them.

    from lecture_lib.parallel import pipeline
    schedule = pipeline.one_f_one_b(4, 8)                      # ranks, micro-batches
    pipeline.validate(schedule)                                # can it be run, and what does each rank hold
    pipeline.simulate(schedule, pipeline.Cost(F=1, I=1, W=1))  # when does what happen
    pipe = pipeline.Pipeline(pipeline.cut(model.layers(), schedule.stages), schedule, loss_fn)
    loss = pipe.step(inputs, targets)                          # run it

Read in this order:

    table.py        a schedule is a table: for each rank the actions F, B, I, W in order; its CSV form
    schedules.py    naive, gpipe, one_f_one_b, interleaved
    zero_bubble.py  zero_bubble_h1, zbv, dualpipe_v: the backward pass in two halves
    memory.py       what a rank holds
    check.py        can a table be run, and if not, why
    simulate.py     how long it takes on paper; the same figures of a measured run
    messages.py     what has to be sent, in an order that cannot deadlock
    cut.py          layers into stages
    backward.py     I and W apart, for any module
    trial.py        what each stage returns, before the first step
    tied.py         a parameter that stages on several ranks share
    execute.py      Pipeline: run any table
"""

from lecture_lib.parallel.pipeline.check import validate
from lecture_lib.parallel.pipeline.cut import cut, parameters_of, times_of
from lecture_lib.parallel.pipeline.execute import Pipeline
from lecture_lib.parallel.pipeline.memory import peak_in_flight, peak_memory
from lecture_lib.parallel.pipeline.messages import program
from lecture_lib.parallel.pipeline.schedules import gpipe, interleaved, naive, one_f_one_b
from lecture_lib.parallel.pipeline.simulate import Cost, Run, measured, simulate
from lecture_lib.parallel.pipeline.table import Action, Schedule, dump_csv, load_csv
from lecture_lib.parallel.pipeline.zero_bubble import dualpipe_v, zbv, zero_bubble_h1

__all__ = [
    "Action",
    "Cost",
    "Pipeline",
    "Run",
    "Schedule",
    "cut",
    "dualpipe_v",
    "dump_csv",
    "gpipe",
    "interleaved",
    "load_csv",
    "measured",
    "naive",
    "one_f_one_b",
    "parameters_of",
    "peak_in_flight",
    "peak_memory",
    "program",
    "simulate",
    "times_of",
    "validate",
    "zbv",
    "zero_bubble_h1",
]
