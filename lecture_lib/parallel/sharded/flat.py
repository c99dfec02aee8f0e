"""Parameters as one flat tensor, of which each rank holds 1/n (Zhao et al. 2023, PyTorch FSDP, section 3.2)."""

import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from lecture_lib.parallel.data import nobody_used, put_gradient


class Flat:
    """Some parameters of one dtype, one after the other in one tensor, of which rank r holds the r-th n-th.

    sharded: the module's parameters; their data are pieces of this rank's shard      (pieces of (k,), k = ceil(N / n))
    full:    parameters of the original shapes; their data are views of the whole, whose memory exists while it is used
    """

    def __init__(self, parameters: list[nn.Parameter], compute_dtype: torch.dtype | None, group: ProcessGroup | None):
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        self.sharded, self._group, self._scale = parameters, group, 1 / n
        self.trained = parameters[0].requires_grad
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        k = -(-sum(self._sizes) // n)
        whole = parameters[0].detach().new_zeros(n * k)
        torch.cat([parameter.detach().flatten() for parameter in parameters], out=whole[: sum(self._sizes)])
        self.shard = whole[rank * k : (rank + 1) * k].clone()  # (k,)
        dtype = compute_dtype if compute_dtype and whole.is_floating_point() else whole.dtype
        self._whole = whole.new_empty(n * k, dtype=dtype)  # (n k,)
        # .data: a later all-gather into the whole is not a change that autograd has to know of.
        self.full = [nn.Parameter(v.data, requires_grad=self.trained) for v in self._views(self._whole)]
        self._whole.untyped_storage().resize_(0)
        myself = weakref.ref(self)  # Python cannot see, and break, a circle through a hook
        for i, parameter in enumerate(self.full if self.trained else []):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: myself().bring(i))
        self._work: Work | None = None
        self._is_whole = False
        self.gradient: Tensor | None = None  # (n k,) in the compute dtype, while the backward pass fills it
        self.arrived: set[int] = set()  # which parameters' gradients are in it

        self._ranges, self._within = [], []  # which elements of each parameter are here, and where in the shard
        first = -rank * k  # where the parameter begins, counted from the beginning of the shard
        for parameter, size in zip(parameters, self._sizes):
            begin, end = min(max(0, -first), size), max(0, min(k - first, size))
            here = slice(first + begin, first + end) if begin < end else slice(0, 0)
            self._ranges.append(slice(begin, max(begin, end)))
            self._within.append(here)
            parameter.grad, parameter.data = None, self.shard[here]
            first += size

    def _views(self, whole: Tensor) -> list[Tensor]:
        """Each parameter within a flat tensor, in its shape."""
        parts = whole[: sum(self._sizes)].split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]

    def gather(self) -> None:
        if self._work is None and not self._is_whole:
            self._whole.untyped_storage().resize_(self._whole.nbytes)
            shard = self.shard.to(self._whole.dtype)
            self._work = dist.all_gather_single(self._whole, shard, group=self._group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work, self._is_whole = None, True

    def free(self) -> None:
        self.wait()
        self._whole.untyped_storage().resize_(0)
        self._is_whole = False

    def bring(self, i: int) -> None:
        """The backward pass has finished the gradient of whole parameter i: copy it, over n, into the flat gradient."""
        if i in self.arrived:
            raise RuntimeError("a second backward pass; call finish_gradient_synchronization() after each.")
        if self.gradient is None:
            self.gradient = self._whole.new_empty(self._whole.shape)
        slot, gradient = self._views(self.gradient)[i], self.full[i].grad
        self.full[i].grad = slot
        put_gradient(gradient, slot, self._scale)
        self.arrived.add(i)

    def complete_gradient(self) -> tuple[Tensor, set[int]]:
        """Hand over the flat gradient, (n k,), with minus zeros for what was not used, and which parameters were."""
        gradient, arrived = self.gradient, self.arrived
        if gradient is None:
            gradient = self._whole.new_empty(self._whole.shape)
        for i, slot in enumerate(self._views(gradient)):
            if i not in arrived:
                put_gradient(None, slot, self._scale)
            self.full[i].grad = None
        gradient[sum(self._sizes) :] = 0
        self.gradient, self.arrived = None, set()
        return gradient, arrived

    def take_gradient(self, shard: Tensor, arrived: set[int]) -> None:
        """Add this rank's shard of the summed gradient, (k,), to the .grad of its pieces."""
        shard = shard.to(self.shard.dtype)
        for i, parameter in enumerate(self.sharded):
            gradient = shard[self._within[i]]
            if i in arrived or not nobody_used(gradient):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def whole(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its whole value, gathered in its own dtype."""
        whole = self.shard.new_empty(self._whole.shape)
        dist.all_gather_single(whole, self.shard, group=self._group)
        yield from zip(self.sharded, self._views(whole))

    def pieces(self) -> Iterator[tuple[nn.Parameter, tuple[torch.Size, slice]]]:
        """Each parameter with its whole shape, and the range of its elements, flattened, that are here."""
        yield from zip(self.sharded, zip(self._shapes, self._ranges))
