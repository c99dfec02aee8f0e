"""Kernels between ranks: real processes, checked against torch.distributed."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from lecture_lib import RankError, World
from lecture_lib import kernels as k
from lecture_lib.kernels.language import INSTALLED, INTERPRETED

pytestmark = pytest.mark.skipif(not (INSTALLED and INTERPRETED), reason="interpreted kernels, which need no GPU")

INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def numbers(n, dtype, rank):
    """Different on every rank, and small enough for sums of 4 in any dtype to be exact."""
    return ((torch.arange(n) * (rank + 3) + rank) % 31).to(dtype)


def references(x):
    """What torch.distributed makes of it: the sum, and everything."""
    known = x.int() if x.dtype == torch.int16 else x.clone()  # gloo does not know int16
    everything = [torch.empty_like(known) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, known)
    dist.all_reduce(known)
    return known.to(x.dtype), torch.stack(everything).to(x.dtype)


def agrees(shape, dtype, times=1):
    """Whether the three collectives give exactly what torch.distributed gives, several times on the same buffer."""
    buffer = k.SymmetricBuffer(shape, dtype)
    for again in range(times):
        x = numbers(buffer.local.numel(), dtype, dist.get_rank() + again).view(buffer.shape)
        total, everything = references(x)
        buffer.local.copy_(x)
        assert torch.equal(k.one_shot_all_reduce(buffer), total)
        assert torch.equal(k.all_gather(buffer), everything)
        assert torch.equal(buffer.local, x), "these two leave the buffer as it is"
        two = k.two_shot_all_reduce(buffer)
        assert torch.equal(two, total) and two.data_ptr() == buffer.local.data_ptr()
    return True


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_collectives_are_exact_in_every_dtype(world, dtype):
    assert world.run(agrees, 103, dtype) == [True] * 4


@pytest.mark.parametrize("shape", [1, 3, (5, 7), 40_001])
def test_collectives_of_any_size(world, shape):
    """Fewer elements than ranks, not a multiple of the ranks or of a block, more than a block."""
    assert world.run(agrees, shape, torch.int32, times=3) == [True] * 4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_on_any_number_of_ranks(worlds, size):
    assert worlds[size].run(agrees, 100, torch.int64) == [True] * size


def test_collectives_in_groups(world):
    def halves():
        low, high = dist.new_group([0, 2]), dist.new_group([1, 3])
        buffer = k.SymmetricBuffer(3, torch.int32, group=low if dist.get_rank() % 2 == 0 else high)
        buffer.local.fill_(10 ** dist.get_rank())
        return k.one_shot_all_reduce(buffer)[0].item(), k.all_gather(buffer)[:, 2].tolist()

    even, odd = (101, [1, 100]), (1010, [10, 1000])
    assert world.run(halves) == [even, odd, even, odd]


def test_sums_of_floats_have_the_same_bits_on_every_rank(world):
    def bits():
        x = torch.randn(999, generator=torch.Generator().manual_seed(dist.get_rank()))
        buffer = k.SymmetricBuffer(999)
        buffer.local.copy_(x)
        one = k.one_shot_all_reduce(buffer)
        two = k.two_shot_all_reduce(buffer).clone()
        assert torch.allclose(one, references(x)[0], atol=1e-5)
        return one, two

    outs = world.run(bits)
    for one, two in outs:
        assert torch.equal(one, outs[0][0]) and torch.equal(two, outs[0][0])


def test_it_reads_the_memory_of_the_others_and_counts_it(world):
    def bytes_moved():
        buffer = k.SymmetricBuffer(4096, torch.float32)
        with k.count_traffic() as one:
            k.one_shot_all_reduce(buffer)
        with k.count_traffic() as two:
            k.two_shot_all_reduce(buffer)
        return one, two

    size = 4096 * 4
    for one, two in world.run(bytes_moved):
        addresses = 8 * 100  # at most: kernels also load where the buffers are
        assert 4 * size <= one.loaded <= 4 * size + addresses and one.stored == size
        assert size <= two.loaded <= size + addresses and two.stored == size


# ---- put and get -----------------------------------------------------------------------------------------------------


def test_put_around_the_ring(world):
    def ring():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        buffer = k.SymmetricBuffer(1000, torch.int32)
        x = torch.full((1000,), 1, dtype=torch.int32) << rank
        for step in range(ranks - 1):
            if step:
                k.wait(buffer, (rank + 1) % ranks)  # it has read what I put there
            k.put(buffer, x, to=(rank + 1) % ranks)
            x = k.wait(buffer, (rank - 1) % ranks) | (1 << rank)
            k.signal(buffer, (rank - 1) % ranks)
        return x.tolist() == [15] * 1000

    assert world.run(ring) == [True] * 4


def test_get_waits_until_the_owner_is_ready(world):
    def read():
        rank = dist.get_rank()
        buffer = k.SymmetricBuffer((2, 5), torch.float32)
        if rank == 0:
            buffer.local.fill_(3.0)
            for to in (1, 2, 3):
                k.signal(buffer, to)
            return None
        return k.get(buffer, owner=0).tolist()

    assert world.run(read) == [None] + [[[3.0] * 5] * 2] * 3


# ---- bad input, and ranks that do not come ---------------------------------------------------------------------------


def test_what_cannot_be_says_why(world):
    def ask():
        said = []
        buffer, flags = k.SymmetricBuffer(3), k.SymmetricBuffer(3, torch.bool)
        for call in (
            lambda: k.put(buffer, torch.zeros(4), to=0),
            lambda: k.put(buffer, torch.zeros(3), to=4),
            lambda: k.get(buffer, owner=-1),
            lambda: k.one_shot_all_reduce(flags),
            lambda: (buffer.close(), k.all_gather(buffer)),
            lambda: k.wait(buffer, 0),
        ):
            try:
                call()
            except (ValueError, TypeError, RuntimeError) as error:
                said.append(str(error))
        return said

    for said in world.run(ask):
        assert said[0].startswith("the buffer is torch.float32 (3,) on cpu and the tensor is torch.float32 (4,) on cpu")
        assert said[1] == "rank 4 is not one of the buffer's 4 ranks, 0 to 3."
        assert said[2].startswith("rank -1 is not one of")
        assert said[3].startswith("kernels between ranks take int8, ") and said[3].endswith("convert to one of them.")
        assert said[4] == said[5] == "this SymmetricBuffer is closed: make a new one, on all ranks."


@pytest.mark.parametrize("victim", [0, 3])
def test_a_kernel_does_not_wait_for_a_rank_that_is_gone(world, tmp_path, victim):
    def die():
        buffer = k.SymmetricBuffer(3)
        k.signal(buffer, buffer.rank)
        k.get(buffer, buffer.rank)  # the first kernel takes longer, and the launcher does not wait long for the others
        buffer.barrier()
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            k.get(buffer, owner=victim)
        except RuntimeError as error:
            (tmp_path / str(dist.get_rank())).write_text(str(error))
            raise

    with pytest.raises(RankError, match=f"^rank {victim} was killed"):
        world.run(die)
    said = {path.read_text() for path in tmp_path.iterdir()}
    assert said == {f"rank {victim} is gone (remote process exited), and others wait for its flag."}


def test_a_rank_that_is_done_early_is_not_missed(world):
    def early():
        buffer = k.SymmetricBuffer(3)
        rank = dist.get_rank()
        if rank == 0:
            k.signal(buffer, 2)
            buffer.close()
            return 0
        if rank == 1:
            time.sleep(0.2)
            k.put(buffer, torch.ones(3), to=2)
        if rank == 2:
            return k.wait(buffer, 1).sum().item() + k.get(buffer, 0).sum().item()

    assert world.run(early) == [0, None, 3.0, None]


def test_a_rank_that_dies_ends_a_collective_with_its_name(world):
    def die():
        buffer = k.SymmetricBuffer(3)
        if dist.get_rank() == 1:
            raise ZeroDivisionError("on purpose")
        k.two_shot_all_reduce(buffer)

    with pytest.raises(RankError, match="^rank 1 raised ZeroDivisionError: on purpose"):
        world.run(die)


# ---- the other way to run --------------------------------------------------------------------------------------------


def test_all_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    """The compiler that comes with Triton needs no GPU: from source to the machine code of an H100."""

    def compile_all():
        os.environ.update(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
        import triton
        import triton.language as tl
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from lecture_lib.kernels import between, within

        def compiled(kernel, pointers, **constants):
            names = [parameter.name for parameter in kernel.params]
            signature = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
            source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()})
            return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

        halves = dict(x="*bf16", w="*bf16", out="*bf16")
        compiled(within._copy, halves, BLOCK=1024)
        compiled(within._gelu, halves, BLOCK=1024)
        compiled(within._softmax, halves, ROWS=1, COLUMNS=1024)
        yield "wgmma", compiled(within._matmul, halves, TILE=64, STEP=64, GROUP=8, GELU=True)  # the matrix units
        ranks = dict(addresses="*i64", flags="*i64", out="*bf16", source="*bf16")
        both = dict(RANKS=2, BLOCK=1024, DTYPE=tl.bfloat16)
        for kernel in (between._one_shot_all_reduce, between._two_shot_all_reduce):
            yield "release", compiled(kernel, ranks, TOTAL=tl.float32, **both)
        for kernel in (between._all_gather, between._put):
            yield "release", compiled(kernel, ranks, **both)
        yield "acquire", compiled(between._get, ranks, **both)

    with World(1) as world:
        (found,) = world.run(lambda: [(word, word in code, "sys" in code) for word, code in compile_all()])
    assert found == [("wgmma", True, False), *[("release", True, True)] * 4, ("acquire", True, True)]
