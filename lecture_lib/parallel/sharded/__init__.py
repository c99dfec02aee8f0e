"""ZeRO: data parallelism in which no rank holds everything (Rajbhandari et al. 2020, ZeRO, section 5).

The batch is split as before. In the plain form every rank also keeps all parameters, all gradients and all of the
optimizer's state, n times the same. For P parameters in fp32 and Adam, bytes held by each of n ranks:

    stage                                     parameters    gradients    optimizer    sent in a step
    0   DataParallel                             4 P           4 P          8 P        2 (n-1)/n 4 P
    1   + ShardedOptimizer                       4 P           4 P        8 P / n      3 (n-1)/n 4 P
    2   DataParallel(sharded_optimizer=...)      4 P         4 P / n      8 P / n      2 (n-1)/n 4 P
    3   FullyShardedDataParallel               4 P / n       4 P / n      8 P / n      3 (n-1)/n 4 P

Stage 1 sends more than stage 0, because here the gradients still travel to everybody; stage 2 does not. Stages 2 and 3
hold for a moment more than the table says: gradients on their way (in stage 2 the bucket that travels and those that
fill, in stage 3 those of two layers), and in stage 3 the parameters of the layer at work and the next.

    optimizer.py    ZeRO-1: who updates which parameter; ZeRO-2 is ``DataParallel`` that knows of it
    fully.py        ZeRO-3: when parameters are gathered and freed, and when gradients travel
    unit.py         which parameters are gathered together
    flat.py         and how they lie in memory
"""

from lecture_lib.parallel.sharded.fully import FullyShardedDataParallel
from lecture_lib.parallel.sharded.optimizer import ShardedOptimizer

__all__ = ["FullyShardedDataParallel", "ShardedOptimizer"]
