"""Before the first step: every stage is tried on one micro-batch, so that all ranks know what will travel.

Who receives a tensor needs room for it before it comes, and so has to know its shape and dtype. Each rank tries its
stages and tells the others, in the order of the stages: what one returns is what the next is tried on. A stage that
cannot work is one error on all ranks, before anybody waits for what it should have sent.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lecture_lib.parallel.agree import describe
from lecture_lib.parallel.pipeline.table import Schedule
from lecture_lib.trace import unrecorded

Shape = tuple[tuple[int, ...], torch.dtype]


def shapes_on_trial(
    stages: dict[int, nn.Module],
    devices: dict[int, torch.device],
    schedule: Schedule,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor | None,
    targets: Tensor | None,
    group: dist.ProcessGroup | None,
) -> list[Shape]:
    """What each stage takes, micro-batches of it, and at the end the loss; the same list on every rank. (The first is
    never asked for: inputs do not travel.) A trial leaves no trace: parameters, buffers, the state of the random number
    generator and the batch stay as they are, and the ledger leaves it out.

    stages, devices:  this rank's, by number
    inputs, targets:  of a batch; needed on the ranks of the first and of the last stage

    Raises ValueError, the same on every rank, for the first stage that cannot be tried, fails, or returns what cannot
    be handed on.
    """
    m, last = schedule.micro_batches, schedule.stages - 1
    shapes: list[Shape] = [((), torch.float32)]
    with unrecorded():
        for number in range(schedule.stages):
            found: list[Shape | str | None] = [None]
            if number in stages:
                try:
                    if number == 0:
                        x = _micro_batch(number, "inputs", inputs, m)
                    else:
                        shape, dtype = shapes[-1]
                        x = torch.zeros(shape, dtype=dtype, device=devices[number])
                    target = _micro_batch(number, "targets", targets, m) if number == last else None
                    y = _output(number, stages[number], x)
                    found = [_loss(loss_fn, y, target) if number == last else _handed_on(number, y)]
                except ValueError as error:
                    found = [str(error)]
            dist.broadcast_object_list(found, group_src=schedule.rank_of[number], group=group)
            if isinstance(found[0], str):
                raise ValueError(f"Pipeline: {found[0]}")
            shapes.append(found[0])
    return shapes


def no_tensor(stage: int, name: str, batch) -> str:
    return f"rank {dist.get_rank()} holds stage {stage} and got {name}={batch!r}; it needs a tensor."


def _micro_batch(stage: int, name: str, batch: Tensor | None, m: int) -> Tensor:
    """A copy of the first of m, for a stage may write into it."""
    if not isinstance(batch, Tensor):
        raise ValueError(no_tensor(stage, name, batch))
    samples = batch.shape[0] if batch.dim() else 0
    if samples == 0 or samples % m:
        raise ValueError(f"{m} micro-batches do not divide {name} of {samples} samples; use a multiple of {m}.")
    return batch.tensor_split(m)[0].detach().clone()


def _output(stage: int, module: nn.Module, x: Tensor) -> Tensor:
    """What the module returns for x, with copies of its buffers."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
            y = torch.func.functional_call(module, buffers, (x,))
    except Exception as error:
        raise ValueError(
            f"stage {stage} (rank {dist.get_rank()}) fails on {describe(x)}: {type(error).__name__}: {error}. Each "
            "stage has to take what the one before it returns."
        ) from None
    if not isinstance(y, Tensor):
        what = f"{type(y).__name__} of {len(y)}" if isinstance(y, (tuple, list)) else type(y).__name__
        raise ValueError(
            f"stage {stage} (rank {dist.get_rank()}) returns a {what}; a stage hands on one tensor, so let it return "
            "one (torch.cat joins several)."
        )
    return y


def _handed_on(stage: int, y: Tensor) -> Shape:
    if not y.is_floating_point():
        raise ValueError(
            f"stage {stage} (rank {dist.get_rank()}) returns {describe(y)}; gradients can only come back through a "
            "floating-point tensor."
        )
    return tuple(y.shape), y.dtype


def _loss(loss_fn: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> Shape:
    try:
        with torch.no_grad():
            loss = loss_fn(output, target)
    except Exception as error:
        raise ValueError(
            f"loss_fn fails on an output of {describe(output)} and targets of {describe(target)}: "
            f"{type(error).__name__}: {error}."
        ) from None
    if not isinstance(loss, Tensor) or loss.dim():
        what = describe(loss) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn returns {what}; it has to return the mean over the micro-batch, a tensor of shape ()."
        )
    return (), loss.dtype
