"""Kernels against what torch has, and how long ranks take to meet, in one run on one machine.

python -m tests.bench.kernels
"""

import statistics
import time

import torch
import torch.distributed as dist

from lecture_lib import World
from lecture_lib import kernels as k
from lecture_lib.kernels.language import INTERPRETED, triton

NOT_MEASURED = "not measured: no GPU"


def row(what, value, ratio="", target=""):
    print(f"{what:<62} {value:>12} {ratio:>30}  {target}".rstrip())


# ---- inside one GPU --------------------------------------------------------------------------------------------------


def milliseconds(function) -> float:
    return triton.testing.do_bench(function, warmup=50, rep=300, return_mode="median")


def on_gpu() -> None:
    x = torch.randn(2**28, device="cuda")  # 1 GiB
    ours, torchs = milliseconds(lambda: k.copy(x)), milliseconds(lambda: x.clone())  # both make their result
    row("copy of 1 GiB", f"{ours:.3f} ms", f"{torchs / ours:.2f} of torch's rate", "at least 0.9")

    for m, n, kk in ((4096, 4096, 4096), (8192, 8192, 8192)):
        a = torch.randn(m, kk, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(kk, n, device="cuda", dtype=torch.bfloat16)
        ours, torchs = milliseconds(lambda a=a, b=b: k.matmul(a, b)), milliseconds(lambda a=a, b=b: a @ b)
        row(f"matmul {m}, bfloat16, tile 128", f"{ours:.3f} ms", f"{ours / torchs:.2f} times torch's", "at most 1.6")
    for tile in (16, 32, 64):
        row(f"  the same with tile {tile}", f"{milliseconds(lambda tile=tile: k.matmul(a, b, tile)):.3f} ms")

    x = torch.randn(16384, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
    fused, pair = milliseconds(lambda: k.matmul_gelu(x, w)), milliseconds(lambda: k.gelu(k.matmul(x, w)))
    row("gelu(x @ w) in one kernel", f"{fused:.3f} ms", f"{fused / pair:.2f} times the pair", "below 1")

    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)
    ours, torchs = milliseconds(lambda: k.softmax(x)), milliseconds(lambda: x.softmax(1))
    row("softmax of 16384 rows of 4096", f"{ours:.3f} ms", f"{ours / torchs:.2f} times torch's")


def all_reduce_between_gpus(elements: int) -> tuple[bool, float, float, float]:
    """In a rank: whether both kernels are exact, and the median seconds of each and of torch's."""
    buffer = k.SymmetricBuffer(elements, torch.int32)
    x = torch.arange(elements, dtype=torch.int32, device=buffer.device) % 1000 + dist.get_rank()
    total = x.clone()
    dist.all_reduce(total)
    buffer.local.copy_(x)
    exact = torch.equal(k.one_shot_all_reduce(buffer), total) and torch.equal(k.two_shot_all_reduce(buffer), total)
    calls = (
        lambda: k.one_shot_all_reduce(buffer),
        lambda: k.two_shot_all_reduce(buffer),
        lambda: dist.all_reduce(x),
    )
    return exact, *(median(call, buffer, 20) for call in calls)


def median(call, buffer, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        buffer.barrier()
        start = time.perf_counter()
        call()
        if buffer.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def between_gpus() -> None:
    gpus = torch.cuda.device_count()
    size, device = (min(gpus, 8), "auto") if gpus >= 2 else (2, "cuda:0")
    with World(size, device=device) as world:
        for elements in (2**14, 2**24):
            exact, one, two, torchs = world.run(all_reduce_between_gpus, elements)[0]
            where = f"{size} GPUs" if gpus >= 2 else "2 ranks on one GPU"
            print(f"all-reduce of {elements * 4 / 2**20:g} MiB, {where}: exact is {exact}")
            row("  one shot", f"{one * 1e6:.0f} us", f"{one / torchs:.2f} times torch's")
            row("  two shot", f"{two * 1e6:.0f} us", f"{two / torchs:.2f} times torch's")


# ---- interpreted -----------------------------------------------------------------------------------------------------


def first_kernel() -> tuple[float, float, float]:
    """In a fresh rank: seconds to import, of the first kernel, and of the next."""
    start = time.perf_counter()
    from lecture_lib.kernels import matmul

    imported = time.perf_counter()
    x = torch.ones(128, 128)
    matmul(x, x, tile=32)
    first = time.perf_counter()
    matmul(x, x, tile=32)
    return imported - start, first - imported, time.perf_counter() - first


def traffic() -> None:
    print("\nmatmul of 128 x 128 by 128 x 128, float32: bytes by formula" + (", and counted" if INTERPRETED else ""))
    x = torch.ones(128, 128, device="cpu" if INTERPRETED else "cuda")
    for tile in (16, 32, 64, 128):
        formula = k.matmul_traffic(128, 128, 128, tile, 4)
        line = f"  tile {tile:>3}   loaded {formula.loaded:>9,}   stored {formula.stored:>7,}"
        if INTERPRETED:
            with k.count_traffic() as counted:
                k.matmul(x, x, tile)
            line += f"   loaded {counted.loaded:>9,}   stored {counted.stored:>7,}"
        print(line)


# ---- meeting ---------------------------------------------------------------------------------------------------------


def barriers(repeats: int) -> tuple[float, float, float]:
    """In a rank: seconds of one barrier, ours and torch's, in turns; and of making a buffer of 1 MiB."""
    start = time.perf_counter()
    buffer = k.SymmetricBuffer(2**18)
    made = time.perf_counter() - start
    ours, torchs = [], []
    for _ in range(15):
        for barrier, times, n in ((buffer.barrier, ours, repeats), (dist.barrier, torchs, repeats // 10)):
            barrier()
            start = time.perf_counter()
            for _ in range(n):
                barrier()
            times.append((time.perf_counter() - start) / n)
    return statistics.median(ours), statistics.median(torchs), made


def main() -> None:
    print(f"kernels: torch {torch.__version__}, kernels are {'interpreted' if INTERPRETED else 'compiled'}\n")
    row("inside one GPU", "median")
    if torch.cuda.is_available():
        on_gpu()
        between_gpus()
    else:
        for what in ("copy of 1 GiB", "matmul, bfloat16, tile 128", "gelu(x @ w) in one kernel", "between GPUs"):
            row(what, NOT_MEASURED)
    traffic()

    print()
    row("between processes", "median", "torch's is")
    with World(1, backend="gloo") as world:
        imported, first, again = world.run(first_kernel)[0]
    row("import lecture_lib.kernels in a fresh rank", f"{imported * 1e3:.0f} ms")
    row("first matmul of 128 x 128, tile 32", f"{first * 1e3:.0f} ms")
    row("next one", f"{again * 1e3:.0f} ms")
    for size in (2, 4):
        with World(size, backend="gloo", device="cpu") as world:
            world.run(barriers, 20)
            ours, torchs, made = world.run(barriers, 200)[0]
        row(f"SymmetricBuffer.barrier(), {size} ranks", f"{ours * 1e6:.1f} us", f"{torchs / ours:.0f} times as long")
        row(f"  SymmetricBuffer of 1 MiB made, {size} ranks", f"{made * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
