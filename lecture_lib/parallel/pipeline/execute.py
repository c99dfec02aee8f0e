"""Run a table: every rank computes its row, and sends and receives what the table implies.

    stages = pipeline.cut(model.layers(), schedule.stages)
    pipe = pipeline.Pipeline(stages, schedule, loss_fn)
    loss = pipe.step(inputs, targets)              # adds to the parameters' gradients

Whatever the table, the gradients are those of the whole batch in one process. A table changes when, and what is held
meanwhile.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lecture_lib.parallel.agree import agree, describe, facts_of
from lecture_lib.parallel.pipeline.backward import Delayed, Splitter
from lecture_lib.parallel.pipeline.check import validate
from lecture_lib.parallel.pipeline.messages import Message, program
from lecture_lib.parallel.pipeline.table import Action, Schedule
from lecture_lib.parallel.pipeline.tied import Tied
from lecture_lib.parallel.pipeline.trial import Shape, no_tensor, shapes_on_trial
from lecture_lib.trace import region

SENDS = 4  # that may be on their way before the rank waits for the oldest; each keeps its tensor


class Pipeline:
    """This rank's stages, and what it does with them.

    stages:     one module for each stage of the schedule, the same list on every rank. A stage takes one tensor and
                returns one, floating-point between stages; shapes and dtypes may change from stage to stage. A rank
                keeps its own stages (``pipe.stages``) and lets go of the others, which may be on the meta device.
    schedule:   any table that ``validate`` accepts, for as many ranks as the group has
    loss_fn:    (output, targets) of a micro-batch -> (), a mean over its samples: the batch's loss is the mean over
                micro-batches
    example:    (inputs, targets) of a batch. What needs one is then checked at construction, else in the first step:
                that it can be divided, and what each stage returns, by a forward pass of one micro-batch on trial
    group:      the ranks; None: all
    recompute:  keep only each stage's input from F to B or I, and compute the rest again there (Chen et al. 2016,
                Training deep nets with sublinear memory cost). Modules that count their calls, such as BatchNorm,
                count twice.

    A parameter that stages on different ranks share, as a tied embedding, starts with the value of the first of these
    ranks, and after each step has the sum of their gradients on all of them.

    Sent in a step, per micro-batch and boundary between ranks: the activation, and a gradient of the same size back.
    For a tied parameter of S bytes on h ranks: (h-1) S by each of them.

    Raises ValueError, with the same message on every rank, for a schedule for another number of ranks or stages or one
    that is not valid, stages that differ between ranks, a stage that fails on an example or does not return a tensor,
    and a batch that the micro-batches do not divide. Raises it on the rank that notices for a batch that is missing
    there, and for a stage that later hands on another shape or dtype than on trial.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: Schedule,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        *,
        example: tuple[Tensor, Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        recompute: bool = False,
    ):
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"Pipeline: rank {dist.get_rank()} is not in this group; only its ranks build it.")
        stages = list(stages)
        problem = _problem(stages, schedule, dist.get_world_size(group))
        facts = []
        if problem is None:
            facts = [f"the schedule {schedule.name} for {schedule.micro_batches} micro-batches", str(schedule)]
            facts += facts_of(nn.ModuleDict({f"stage {i}": stage for i, stage in enumerate(stages)}))
        agree("Pipeline", facts, group, problem)
        self.schedule, self.loss_fn, self.group, self.recompute = schedule, loss_fn, group, recompute
        self.stages = {number: stages[number] for number in range(len(stages)) if self._has(number)}
        self._devices = {number: _device(stage, group) for number, stage in self.stages.items()}
        # What travels lies where it is, or, since gloo sends from there only, in CPU memory.
        self._wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else None
        self._program = program(schedule)[self.rank]
        split = {(action.stage, action.micro_batch) for action in schedule.rows[self.rank] if action.kind == "I"}
        self._split = split  # (stage, micro-batch) whose backward pass comes in two halves
        self._splitters = {number: Splitter(self.stages[number]) for number in {number for number, _ in split}}
        for splitter in self._splitters.values():
            weakref.finalize(self, splitter.remove)
        self._tied = Tied(stages, schedule.rank_of, group, self._wire)
        self._shapes: list[Shape] | None = None  # what each stage takes: micro-batches of ...; at the end, the loss
        self._batch = None, None  # inputs and targets, in words
        if example is not None:
            self._try(*example)

    def _has(self, stage: int) -> bool:
        return 0 <= stage < self.schedule.stages and self.schedule.rank_of[stage] == self.rank

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's stages, each once: for an optimizer."""
        return nn.ModuleList(self.stages.values()).parameters()

    def step(self, inputs: Tensor | None, targets: Tensor | None, share_loss: bool = False) -> Tensor | None:
        """Forward and backward of a batch: adds to every parameter's ``grad``.

        inputs, targets: (batch, ...), used on the ranks of the first and of the last stage; other ranks may bring them
        too, and should, for then all of them notice a wrong batch. Every batch has the shape of the first.
        Returns the batch's loss, detached, (), on the rank of the last stage, None elsewhere; with ``share_loss`` on
        all, by a broadcast.
        """
        if not torch.is_grad_enabled():
            raise ValueError(
                "Pipeline: step was called where gradients are off (torch.no_grad or inference_mode), and it goes "
                "backward; call it outside, or call evaluate."
            )
        self._check(inputs, targets)
        step, before = _Step(self, inputs, targets), self._tied.set_aside()
        for messages, action in self._program:
            step.exchange(messages)
            if action is not None:
                step.compute(action)
        step.finish()
        self._tied.add(before)
        return self._shared(step.loss) if share_loss else step.loss

    def evaluate(self, inputs: Tensor | None, targets: Tensor | None, share_loss: bool = False) -> Tensor | None:
        """The loss alone, without gradients: the forward actions of the table. Otherwise as ``step``."""
        self._check(inputs, targets)
        step = _Step(self, inputs, targets)
        with torch.no_grad():
            for messages, action in self._program:
                step.exchange([message for message in messages if message.use.kind == "F"])
                if action is not None and action.kind == "F":
                    step.compute(action)
        step.finish()
        return self._shared(step.loss) if share_loss else step.loss

    def _shared(self, loss: Tensor | None) -> Tensor:
        last, (shape, dtype) = self.schedule.rank_of[-1], self._shapes[-1]
        if loss is None:
            loss = torch.empty(shape, dtype=dtype, device=next(iter(self._devices.values())))
        loss = loss.to(dtype)
        dist.broadcast(loss, group=self.group, group_src=last)
        return loss

    def _try(self, *batch: Tensor | None) -> None:
        self._shapes = shapes_on_trial(self.stages, self._devices, self.schedule, self.loss_fn, *batch, self.group)
        self._batch = tuple(part if part is None else describe(part) for part in batch)

    def _check(self, *batch: Tensor | None) -> None:
        """The first batch is tried, and every later one has its shape."""
        if self._shapes is None:
            self._try(*batch)
        for stage, name, now in zip((0, self.schedule.stages - 1), ("inputs", "targets"), batch):
            if self._has(stage) and not isinstance(now, Tensor):
                raise ValueError(f"Pipeline: {no_tensor(stage, name, now)}")
        for name, now, first in zip(("inputs", "targets"), batch, self._batch):
            if now is not None and first is not None and describe(now) != first:
                raise ValueError(
                    f"Pipeline: {name} of {describe(now)}, after a first batch of {first}; all batches have one shape. "
                    "For another one, make another Pipeline of the same stages."
                )


class _Step:
    """One batch on its way through this rank."""

    def __init__(self, pipe: Pipeline, inputs: Tensor | None, targets: Tensor | None):
        self.pipe, self.micro_batches = pipe, pipe.schedule.micro_batches
        self.last = pipe.schedule.stages - 1
        self.inputs = _divided(inputs, self.micro_batches) if 0 in pipe.stages else ()
        self.targets = _divided(targets, self.micro_batches) if self.last in pipe.stages else ()
        self.loss: Tensor | None = None
        self._came: dict[Action, tuple[Tensor, list]] = {}  # F or I -> what it needs, and what to wait for before
        self._going: dict[Action, Tensor] = {}  # F or I on another rank -> what it needs
        self._sends: deque[tuple[Tensor, list]] = deque()
        self._held: dict[tuple[int, int], tuple] = {}  # (stage, micro-batch) -> what B or I will need
        self._delayed: dict[tuple[int, int], Delayed] = {}  # (stage, micro-batch) -> what W will do

    # ---- messages ----------------------------------------------------------------------------------------------------

    def exchange(self, messages: list[Message]) -> None:
        """Begin to send and receive all of these."""
        if not messages:
            return
        transfers = []
        for use, source, target in messages:
            if source == self.pipe.rank:
                operation, peer, tensor = dist.isend, target, self._going.pop(use)
            else:
                operation, peer, tensor = dist.irecv, source, self._room(use)
            transfers.append(dist.P2POp(operation, tensor, group=self.pipe.group, group_peer=peer))
        works = dist.batch_isend_irecv(transfers)
        for number, (message, transfer) in enumerate(zip(messages, transfers)):
            waits = [works[number]] if len(works) == len(transfers) else works  # NCCL: one for the whole batch
            if message.target == self.pipe.rank:
                self._came[message.use] = transfer.tensor, waits
            else:
                self._sends.append((transfer.tensor, waits))
        while len(self._sends) > SENDS:
            self._sent()

    def _room(self, use: Action) -> Tensor:
        """For what comes: a stage's input, or the gradient of its output, which is the next stage's input."""
        shape, dtype = self.pipe._shapes[use.stage if use.kind == "F" else use.stage + 1]
        return torch.empty(shape, dtype=dtype, device=self.pipe._wire or self.pipe._devices[use.stage])

    def _sent(self) -> None:
        for work in self._sends.popleft()[1]:
            work.wait()

    def _take(self, use: Action) -> Tensor:
        tensor, waits = self._came.pop(use)
        for work in waits:
            work.wait()
        return tensor.to(self.pipe._devices[use.stage])

    def _hand_on(self, use: Action, tensor: Tensor) -> None:
        if self.pipe._has(use.stage):
            self._came[use] = tensor, []
        else:
            self._going[use] = tensor.to(self.pipe._wire or tensor.device).contiguous()

    def finish(self) -> None:
        while self._sends:
            self._sent()

    # ---- actions -----------------------------------------------------------------------------------------------------

    def compute(self, action: Action) -> None:
        stage, kind, i = action
        if kind == "F":
            x = self.inputs[i] if stage == 0 else self._take(action).requires_grad_()
            with region(str(action)):
                self._forward(stage, i, x)
        elif kind in "BI":
            gradient = None if stage == self.last else self._take(Action(stage, "I", i))
            with region(str(action)):
                self._backward(stage, i, gradient)
        else:
            with region(str(action)):
                self._delayed.pop((stage, i)).compute()

    def _forward(self, stage: int, i: int, x: Tensor) -> None:
        if self.pipe.recompute or not torch.is_grad_enabled():
            random, again = _random_state(x), torch.is_grad_enabled()
            with torch.no_grad():
                output = self._output(stage, i, x, again)
            if again:
                self._held[stage, i] = x, random
        else:
            output = self._output(stage, i, x)
            # The graph is held, not the output: unless a module saved it, it is freed as soon as it is sent.
            self._held[stage, i] = x, _root(output)
        if stage == self.last:
            self.loss = output.detach() if self.loss is None else self.loss + output.detach()
        else:
            self._as_on_trial(stage, output)
            self._hand_on(Action(stage + 1, "F", i), output.detach())

    def _as_on_trial(self, stage: int, output: Tensor) -> None:
        """Else the next rank would read something else from the bytes."""
        shape, dtype = self.pipe._shapes[stage + 1]
        if tuple(output.shape) != shape or output.dtype != dtype:
            raise ValueError(
                f"Pipeline: stage {stage} (rank {dist.get_rank()}) returns {describe(output)}, and on trial returned "
                f"{describe(torch.empty(shape, dtype=dtype, device='meta'))}; use the same autocast for the trial "
                "(example=, else the first batch) and for every step and evaluate, and do not convert stages after it."
            )

    def _output(self, stage: int, i: int, x: Tensor, again: bool = False) -> Tensor:
        """What the stage returns; the last one: its part of the batch's loss. ``again``: it will be computed once more
        from the same tensors, so in-place operations get a copy."""
        splitting = contextlib.nullcontext()
        if (stage, i) in self.pipe._split and torch.is_grad_enabled():
            self._delayed[stage, i] = Delayed()
            splitting = self.pipe._splitters[stage].delaying(self._delayed[stage, i])
        with splitting:
            x = x.clone() if again else _Entry.apply(x) if x.is_leaf and x.requires_grad else x
            y = self.pipe.stages[stage](x)
        if stage < self.last:
            return y
        target = self.targets[i].clone() if again else self.targets[i]
        return self.pipe.loss_fn(y, target) / self.micro_batches

    def _backward(self, stage: int, i: int, gradient: Tensor | None) -> None:
        """B, or I where the forward pass was split. ``gradient``: of the stage's output; None: it is the loss."""
        x, root = self._held.pop((stage, i))
        if self.pipe.recompute:
            with _random_state_of(x, root):
                root = _root(self._output(stage, i, x))
        if root is not None:
            torch.autograd.backward(root, gradient)
        if stage > 0:
            back, x.grad = x.grad, None
            self._hand_on(Action(stage - 1, "I", i), torch.zeros_like(x) if back is None else back)


def _divided(batch: Tensor, parts: int) -> list[Tensor]:
    """Micro-batches, in the batch's memory. ``data``: autograd shall not take a write into one for a write into all."""
    return [part if batch.requires_grad else part.data for part in batch.tensor_split(parts)]


class _Entry(torch.autograd.Function):
    """y = x, in the same memory. x is a leaf, so that it gets ``grad``; into y, which is none, a stage may write."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def _root(output: Tensor):
    """Where a backward pass begins; None: nothing here needs a gradient."""
    if not output.requires_grad:
        return None
    return output if output.dim() == 0 else get_gradient_edge(output)


def _random_state(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None


@contextlib.contextmanager
def _random_state_of(x: Tensor, state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Dropout falls as it did when ``state`` was read."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.set_rng_state(state[0])
        if x.is_cuda:
            torch.cuda.set_rng_state(state[1], x.device)
        yield


def _device(stage: nn.Module, group: dist.ProcessGroup | None) -> torch.device:
    """Where a stage computes: where its parameters are."""
    for tensor in (*stage.parameters(), *stage.buffers()):
        return tensor.device
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _problem(stages: list, schedule: Schedule, ranks: int) -> str | None:
    """What is wrong with this rank's arguments, as the end of a sentence that begins with "rank 2"."""
    if not isinstance(schedule, Schedule):
        return f"brought a schedule of type {type(schedule).__name__}; make one, as with pipeline.gpipe(4, 8)."
    if schedule.ranks != ranks:
        return f"brought {schedule.name} for {schedule.ranks} ranks, and the group has {ranks}; make it for {ranks}."
    try:
        validate(schedule)
    except ValueError as error:
        return f"brought a schedule that cannot be run: {error}"
    if len(stages) != schedule.stages:
        return (
            f"brought {len(stages)} stages, and {schedule.name} has {schedule.stages}; cut the model into "
            f"{schedule.stages}."
        )
    for number, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            return f"brought a stage {number} of type {type(stage).__name__}; a stage is an nn.Module."
    return None
