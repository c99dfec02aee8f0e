"""Data parallelism: the model is copied, the batch is split, the gradients travel.

Every rank holds all parameters and computes the gradients of its share of the batch. The gradient of the whole batch is
their average. Sending it costs 2 (n-1)/n bytes for each byte of gradient, whatever the batch.

    average_gradients   after the backward pass, one all-reduce for each parameter
    DataParallel        during the backward pass, many parameters to an all-reduce (Li et al. 2020, PyTorch Distributed,
                        section 3.2: buckets, and overlap of communication with computation)
    sharded_batches     who computes which samples
"""

import contextlib
import functools
import numbers
import weakref
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work

from lecture_lib.parallel.agree import (
    agree,
    broadcast_from_first,
    facts_of,
    several_devices,
    split_among,
    split_parts,
    unchanged,
)


def average_gradients(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Replace every .grad by its average over the ranks; to be called between backward() and step().

    All ranks must have used the same parameters. Sends 2 (n-1)/n bytes for each byte of gradient.

    Raises ValueError, before anything is sent, if these ranks hold different slices of a part of the module: experts,
    which have an ``average_gradients`` of their own, in ``lecture_lib.parallel.expert``, or tensor-parallel layers.
    """
    if problem := split_among(module, group):
        raise ValueError(f"average_gradients: every rank {problem}")
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=ReduceOp.AVG, group=group)


@torch.no_grad()
def clip_to_norm(
    module: nn.Module, max_norm: float, group: ProcessGroup | None = None, *, gradients_are_split: bool
) -> Tensor:
    """What ``clip_gradients`` of the wrappers does: the norm before, (), on every rank.

    If the gradients are split, each element on one rank, the sums of squares are added up: an all-reduce of 8 bytes.
    """
    for name, ranks in split_parts(module):
        raise ValueError(
            f"clip_gradients: ranks {', '.join(map(str, ranks))} hold different slices of {name}, and their norm is of "
            "all slices; use lecture_lib.parallel.mesh.ParallelTransformer, whose clip_gradients() knows who has what."
        )
    parameters = list(module.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if gradients_are_split:
        squares = norm.to(next(iter(parameters), norm).device, torch.float64) ** 2
        dist.all_reduce(squares, group=group)
        norm = squares.sqrt().float()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# ---- the batch -------------------------------------------------------------------------------------------------------


def sharded_batches(
    *tensors: Tensor, batch_size: int, epoch: int = 0, seed: int = 0, group: ProcessGroup | None = None
) -> Iterator[tuple[Tensor | float, ...]]:
    """This rank's share of every batch of one epoch: (share of each tensor..., scale).

    tensors:     one row for each sample, (samples, ...), the same on every rank
    batch_size:  rows of a whole batch, over all ranks; a multiple of their number
    epoch, seed: together they decide the order. Every sample comes exactly once in an epoch, and a batch holds the same
                 samples however many ranks share it
    scale:       n / rows in the whole batch. The loss of a share is scale * (sum over its rows): its average over the
                 ranks is then the mean over the batch, also for the last batch, where some ranks may have fewer rows or
                 none. Where the share is batch_size / n, that is the mean over the share.

    Sends nothing. Raises ValueError, the same on every rank, before the first batch.
    """
    n, rank, rows = dist.get_world_size(group), dist.get_rank(group), [len(tensor) for tensor in tensors]
    problem = None
    if len(set(rows)) != 1:
        problem = f"brought tensors of {rows} rows; they must have one row for each sample."
    elif not all(isinstance(number, numbers.Integral) for number in (batch_size, epoch, seed)) or min(epoch, seed) < 0:
        problem = f"asked for {batch_size=}, {epoch=}, {seed=}; they are whole numbers, and none is below 0."
    elif batch_size < 1 or batch_size % n:
        near = max(n, batch_size // n * n)
        problem = f"asked for batches of {batch_size}, which {n} ranks cannot share equally; {near} would do."
    agree("sharded_batches", [f"{rows} rows", f"batch_size={batch_size}", f"{epoch=}, {seed=}"], group, problem)
    return _shares(tensors, batch_size, epoch, seed, n, rank)


def _shares(tensors, batch_size: int, epoch: int, seed: int, n: int, rank: int):
    order = np.random.default_rng((seed, epoch)).permutation(len(tensors[0]))  # (samples,), the same on every rank
    for first in range(0, len(order), batch_size):
        batch = torch.from_numpy(order[first : first + batch_size])  # (batch_size,), the last one perhaps shorter
        mine = batch.tensor_split(n)[rank]
        yield *(tensor[mine.to(tensor.device)] for tensor in tensors), n / len(batch)


# ---- the gradients ---------------------------------------------------------------------------------------------------


class Bucket:
    """Gradients that travel together, one after the other in ``flat``."""

    def __init__(self, owner: int | None):
        self.owner = owner  # global rank of the only one that needs the sums; None: all ranks do
        self.parameters: list[nn.Parameter] = []
        self.bytes = 0
        self.ready: set[nn.Parameter] = set()  # those whose gradient the backward pass has brought
        self.flat: Tensor | None = None  # (elements,)
        self.slots: dict[nn.Parameter, Tensor] = {}  # for each its part of flat, in its shape
        self.work: Work | None = None  # the collective, once begun
        self.holds_sums = False  # of the step before, on the owner, unless zero_grad() has been called since

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self.bytes += parameter.nbytes

    def bring(self, parameter: nn.Parameter, scale: float) -> None:
        """Copy scale * parameter.grad into the parameter's slot, and let .grad be that slot."""
        if self.flat is None:
            sizes = [p.numel() for p in self.parameters]
            self.flat = self.parameters[0].detach().new_empty(sum(sizes))
            self.slots = {p: part.view(p.shape) for p, part in zip(self.parameters, self.flat.split(sizes))}
        slot, gradient = self.slots[parameter], parameter.grad
        if self.holds_sums and gradient is slot:  # only for a forward() before the step, which could not tell
            raise RuntimeError(f"DataParallel: rank {dist.get_rank()} {NO_ZERO_GRAD}")
        parameter.grad = slot
        put_gradient(gradient, slot, scale)

    def wait(self) -> None:
        """Until the sums are there. Who does not need them drops them."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        mine = self.owner in (None, dist.get_rank())
        for parameter, slot in self.slots.items():
            if not mine or (parameter not in self.ready and slot.numel() and nobody_used(slot)):
                parameter.grad = None
        if not mine:
            self.flat.untyped_storage().resize_(0)  # freed now, and not when the backend lets go of it
            self.flat, self.slots = None, {}
        self.holds_sums = mine and self.owner is not None


NO_ZERO_GRAD = (
    "has last step's sums in .grad, and with a sharded optimizer no new gradient can be added to them; call "
    "zero_grad() after each step (its default, set_to_none=True, also frees them)."
)


def fill_buckets(parameters: list[nn.Parameter], limit: float, owner_of) -> list[Bucket]:
    """Buckets of at most ``limit`` bytes (or one parameter), of one dtype and owner each, in reverse order."""
    buckets, filling = [], {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, owner_of(parameter)
        if kind in filling and filling[kind].bytes + parameter.nbytes > limit:
            buckets.append(filling.pop(kind))
        filling.setdefault(kind, Bucket(kind[1])).add(parameter)
    buckets += filling.values()
    position = {parameter: i for i, parameter in enumerate(reversed(parameters))}
    return sorted(buckets, key=lambda bucket: position[bucket.parameters[-1]])  # in which they will be full


# A parameter that a rank did not use brings minus zeros. One that it used brings none, because 0 + -0 is 0 (but for a
# negative number so small that 1/n of it is rounded to zero). A sum is minus zero only if every term is. So the slot
# itself tells whether any rank used the parameter, and no flag travels.


@torch.no_grad()
def put_gradient(gradient: Tensor | None, slot: Tensor, scale: float) -> None:
    """slot = 0 + scale * gradient, or minus zeros where there is none. Both have the same shape."""
    if gradient is None:
        slot.fill_(-0.0)
    elif gradient.is_sparse:
        raise RuntimeError("a sparse gradient cannot travel in a bucket; make the embedding with sparse=False.")
    else:
        torch.add(_zero(gradient.dtype), gradient, alpha=scale, out=slot)


@functools.cache
def _zero(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype)


def nobody_used(summed: Tensor) -> bool:
    """Whether this sum over the ranks is one of minus zeros only."""
    return bool(((summed == 0) & summed.signbit()).all())


class DataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks while the backward pass still runs.

        model = DataParallel(module)
        loss_of(model(x), y).backward()             # x, y: this rank's share of the batch
        model.finish_gradient_synchronization()     # now every .grad is the average
        optimizer.step()

    module:     the same on every rank; parameters and buffers take the values of the group's first rank. It stays
                ``.module``; ``state_dict()`` is the bare module's
    bucket_mb:  gradients travel in buckets of about this many MB (1e6 bytes), one dtype to a bucket, in the reverse of
                the order in which the parameters were made: about the order in which the backward pass finishes them.
                0 sends each alone
    group:      the ranks that share the batch; all ranks if None
    sharded_optimizer: a ShardedOptimizer of the same parameters. Each gradient then goes only to the rank that updates
                the parameter, and the others drop theirs (ZeRO-2; call ``zero_grad()`` after each step, which the
                ranks compare in forward(): 16 bytes a rank, and the ledger leaves them out)

    Frozen parameters are left out. A parameter that no rank used in a step keeps .grad None; one that some ranks used
    counts as zero on the others. In training, buffers (running means of batch norm) take the first rank's values before
    each forward pass: in place, so of two forward() before the backward pass of the first, the second may change a
    buffer that the first one's graph still needs, which backward() refuses.

    To clip gradients use ``clip_gradients()``. With a sharded optimizer ``torch.nn.utils.clip_grad_norm_`` sees only
    what this rank owns: every rank would clip by a norm of its own, and nothing would say so.

    Sends, in a step, 2 (n-1)/n bytes for each byte of gradient; with a sharded optimizer (n-1)/n, on average over the
    ranks. The averaged .grad are views of the buckets: the next step overwrites them.

    Raises ValueError at construction, the same on every rank, if ranks bring different modules, different slices of one
    that is split over these ranks, or one with parameters on several devices; RuntimeError in forward() if the module's
    parameters have changed since.
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0, *, group=None, sharded_optimizer=None):
        super().__init__()
        self.module, self.group = module, group
        problem = several_devices([*module.named_parameters(), *module.named_buffers()]) or split_among(module, group)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        owner_of, owners = (lambda _: None), ["no sharded optimizer"]
        if sharded_optimizer:
            owner_of, ranks = sharded_optimizer.owner_of, dist.get_process_group_ranks(group or dist.group.WORLD)
            named = [(name, owner_of(p)) for name, p in module.named_parameters() if p.requires_grad]
            owners = [f"a sharded optimizer that gives {name} to rank {owner}" for name, owner in named]
            for name, owner in named:
                if owner is None:
                    problem = "brought a sharded optimizer of other parameters; make it from this module's parameters."
                elif owner not in ranks:
                    problem = (
                        f"brought a sharded optimizer that gives {name} to rank {owner}, which is not in the group "
                        f"{ranks}; make it with the same group."
                    )
        agree("DataParallel", [f"bucket_mb={bucket_mb}", *owners, *facts_of(module)], group, problem)
        broadcast_from_first([*module.parameters(), *module.buffers()], group)

        self._check_unchanged = unchanged("DataParallel", module)
        self._scale = 1 / dist.get_world_size(group)
        self._synchronize = True
        self._is_sharded = sharded_optimizer is not None
        self._buckets = fill_buckets(trained, 1e6 * bucket_mb, owner_of)
        self._begun = 0  # how many of the buckets are on their way
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        ready = weakref.WeakMethod(self._gradient_ready)  # a wrapper that is dropped does nothing any more
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(lambda p: (hook := ready()) and hook(p))

    def forward(self, *args, **kwargs):
        self._check_unchanged()
        if self._is_sharded and self._synchronize and torch.is_grad_enabled():
            self._check_zero_grad()
        if self._synchronize and self.module.training:
            broadcast_from_first(list(self.module.buffers()), self.group)
        return self.module(*args, **kwargs)

    def _check_zero_grad(self) -> None:
        """Only the owner of a parameter can see that its gradient is last step's sum: it tells all others."""
        held = [(p, slot) for bucket in self._buckets if bucket.holds_sums for p, slot in bucket.slots.items()]
        stale = any(p.grad is slot and slot.any() for p, slot in held)
        agree("DataParallel", [], self.group, NO_ZERO_GRAD if stale else None)
        for bucket in self._buckets:
            bucket.holds_sums = False

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes in the block only add to this rank's .grad: for all micro-batches of a step but the last."""
        outside, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = outside

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """The backward pass has finished parameter.grad."""
        if not self._synchronize:
            return
        bucket = self._bucket_of[parameter]
        if parameter in bucket.ready:
            raise RuntimeError(
                "a second backward pass before the first one's gradients were averaged; call "
                "finish_gradient_synchronization() after each, or put all but the last under no_sync()."
            )
        bucket.bring(parameter, self._scale)
        bucket.ready.add(parameter)
        # In this order on every rank, whatever the order in which their gradients became ready.
        for bucket in self._buckets[self._begun :]:
            if len(bucket.ready) < len(bucket.parameters):
                break
            self._begin(bucket)

    def _begin(self, bucket: Bucket) -> None:
        if bucket.owner is None:
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        else:
            if self._begun:  # one at a time, so that at most two buckets of other ranks' gradients are held
                self._buckets[self._begun - 1].wait()
            bucket.work = dist.reduce(bucket.flat, dst=bucket.owner, group=self.group, async_op=True)
        self._begun += 1

    def finish_gradient_synchronization(self) -> None:
        """Wait until every .grad is the average over the ranks. Every rank calls it, once, after the backward pass."""
        for bucket in self._buckets[self._begun :]:
            for parameter in bucket.parameters:
                if parameter not in bucket.ready:
                    bucket.bring(parameter, self._scale)
            self._begin(bucket)
        for bucket in self._buckets:
            bucket.wait()
            bucket.ready.clear()
        self._begun = 0

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm, that of all parameters together, is at most ``max_norm``. Returns the
        norm before, (), on every rank. After finish_gradient_synchronization(); every rank calls it.

        Sends nothing; with a sharded optimizer an all-reduce of 8 bytes. Raises ValueError for a module that is split
        over other ranks.
        """
        return clip_to_norm(self.module, max_norm, self.group, gradients_are_split=self._is_sharded)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)
