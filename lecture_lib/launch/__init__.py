"""A function, or a notebook cell, runs on every rank.

Read in this order:

    world.py        what a person holds: World(4).run(fn), one loop that waits for all ranks
    fork_server.py  a process that has imported torch and forks a rank in milliseconds
    rank.py         what a rank does: set up, then run what it is sent, forever
    watch.py        what a rank is doing right now, told by a second thread in it
    wire.py         objects between notebook and rank, by value
    transcript.py   what ranks print: labelled, in rank order, cut where it is too much
    errors.py       the sentences people read when something goes wrong
    magic.py        %%ranks
"""

from lecture_lib.launch.errors import RankError, RankTimeout
from lecture_lib.launch.world import World

__all__ = ["RankError", "RankTimeout", "World"]
