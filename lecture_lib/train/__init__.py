"""Train a small transformer on text, with any layout of ranks: ``python -m lecture_lib.train``.

    python -m lecture_lib.train                                                   one process
    torchrun --nproc-per-node 4 -m lecture_lib.train --tp 2 --pp 2                four on this machine
    sbatch tools/train.sbatch --tp 2 --pp 2                                       some nodes, under Slurm

    from lecture_lib import World, train                                          from a cell: the same
    result = World(4).run(train.train, train.options("--tp 2 --pp 2 --quiet"))[0]

Read in this order:

    options.py     all that can be chosen
    text.py        text as tokens, and which of it a step sees
    loop.py        build the model on its mesh, train it, sample from it
    checkpoint.py  what a killed run leaves, and how another layout goes on with it
    tradeoff.py    store, recompute or communicate: what each costs
    flops.py       the FLOP of a step, counted
"""

from lecture_lib.train.loop import Result, Training, build, profile, train
from lecture_lib.train.options import options
from lecture_lib.train.tradeoff import Row, tradeoff, tradeoff_table

__all__ = ["Result", "Row", "Training", "build", "options", "profile", "tradeoff", "tradeoff_table", "train"]
