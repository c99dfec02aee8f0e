"""What this machine's memories reach, beside other programs that measure the same, in one run on one machine.

python -m tests.bench.hardware

The other programs are Debian's mbw (main) and lmbench (non-free); what is missing is said and left out. Their turns and
ours alternate, since other work on a shared machine changes all numbers by the minute.
"""

import glob
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

from lecture_lib.hardware.detect import detect, size
from lecture_lib.hardware.probe import copy_bandwidth, duration, latency, plateau_sizes, probe, rate
from lecture_lib.hardware.roofline import attention, gelu, layer_norm, matmul, measured_peaks, softmax, table

TURNS = 5
# lmbench would spend half a minute on finding out how long to run; 10 ms is long enough.
LMBENCH = os.environ | {"ENOUGH": "10000", "TIMING_O": "0", "LOOP_O": "0"}


def lmbench(program: str) -> str | None:
    """Where a program of lmbench is; Debian keeps them out of PATH."""
    return shutil.which(program) or next(iter(glob.glob(f"/usr/lib/lmbench/bin/*/{program}")), None)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=LMBENCH, timeout=60, check=True)
    return done.stdout + done.stderr


def mbw_copy(nbytes: int) -> float:
    """Bytes/s that mbw copies with memcpy between two arrays of ``nbytes``; the first of its runs touches new pages."""
    runs = re.findall(r"Copy: ([\d.]+) MiB/s", run("mbw", "-q", "-a", "-n", "8", "-t0", str(nbytes // 2**20)))
    return statistics.median(float(r) for r in runs[1:]) * 2**20


def lmbench_copy(nbytes: int) -> float:
    """Bytes/s that lmbench copies with the C library's bcopy."""
    return float(run(lmbench("bw_mem"), "-N", "3", "-W", "0", str(nbytes), "bcopy").split()[1]) * 1e6


def lmbench_latency(nbytes: int) -> float:
    """Seconds for a load from ``nbytes``, in random order. lmbench goes through all sizes up to one in whole MB."""
    lines = run(lmbench("lat_mem_rd"), "-t", "-N", "1", str(max(1, nbytes // 2**20)), "64").splitlines()
    pairs = [map(float, line.split()) for line in lines if re.fullmatch(r"[\d.]+ [\d.]+", line)]
    return min((abs(mib * 2**20 - nbytes), ns) for mib, ns in pairs)[1] * 1e-9


def small_pages(measure):
    """``measure`` with memory as the other programs allocate it. NumPy asks Linux for pages of 2 MiB, which save a
    search in the page tables; memory in pages of 4 KiB is slower."""

    def measured(nbytes: int) -> float:
        code = f"from lecture_lib.hardware.probe import {measure.__name__} as f; print(f({nbytes}))"
        environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
        return float(
            subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        )

    return measured


def compare(what: str, ours, theirs, nbytes: int, show) -> None:
    """One line: the medians of both, and the median of the ratio of turns next to each other."""
    pairs = [(ours(nbytes), theirs(nbytes)) for _ in range(TURNS)]
    ratio = statistics.median(a / b for a, b in pairs)
    a, b = (statistics.median(column) for column in zip(*pairs))
    print(
        f"{what:<44}{show(a):>14}{show(b):>14}{ratio:>12.2f}  {'' if 0.8 <= ratio <= 1.25 else 'more than 25 % apart'}"
    )


def main() -> None:
    machine = detect()
    print(f"hardware\n\n{machine}\n")
    start = time.perf_counter()
    report = probe(machine)
    elapsed = time.perf_counter() - start
    print(f"{report.curve_table()}\n\n{report.table()}\n\nprobe took {elapsed:.1f} s, to stay under 10 s\n")

    levels = plateau_sizes(machine)
    print(f"{'against other programs':<44}{'here':>14}{'there':>14}{'ratio':>12}  to reach: within 25 %")
    if shutil.which("mbw"):
        compare("copy memory (64 MiB), mbw", small_pages(copy_bandwidth), mbw_copy, 2**26, rate)
    else:
        print("mbw is not installed: apt-get install mbw")
    if lmbench("bw_mem") and lmbench("lat_mem_rd"):
        for name, n in levels.items():
            n = min(n, 2**26)  # lmbench is slow, and no step lies beyond
            copy, wait = map(small_pages, (copy_bandwidth, latency)) if name == "memory" else (copy_bandwidth, latency)
            compare(f"copy {name} ({size(n)}), lmbench", copy, lmbench_copy, n, rate)
            compare(f"latency {name} ({size(n)}), lmbench", wait, lmbench_latency, n, duration)
    else:
        print("lmbench is not installed: apt-get install lmbench, from Debian's non-free")

    operations = (matmul(1024, 1024, 1024, "fp32"), matmul(1, 1024, 1024, "fp32"), gelu(2**20, "fp32"))
    operations += (softmax(1024, 1024, "fp32"), layer_norm(1024, 1024, "fp32"), attention(1, 8, 1024, 1024, 64, "fp32"))
    print(f"\n{table(operations, measured_peaks())}")


if __name__ == "__main__":
    main()
