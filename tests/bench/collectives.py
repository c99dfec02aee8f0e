"""The collectives of this package beside the backend's own, in one run on one machine.

python -m tests.bench.collectives
"""

import math
import os

from lecture_lib import World
from lecture_lib.collectives import bench, cost
from lecture_lib.hardware import detect
from lecture_lib.hardware.probe import copy_bandwidth

MIB = 1 << 20
LARGE = (16 * MIB, 64 * MIB)


def by_algorithm(rows: list[bench.Row]) -> dict[tuple[str, int], bench.Row]:
    return {(row.algorithm, row.nbytes): row for row in rows}


def ratio(rows: list[bench.Row], ours: str, nbytes: int) -> str:
    found = by_algorithm(rows)
    theirs, mine = found["torch", nbytes], found[ours, nbytes]
    return f"{bench.size(nbytes)}: {theirs.seconds / mine.seconds:.1f} times as fast as the backend"


def model(world: World) -> None:
    """Fit alpha and beta to the ring and the tree, predict where they cross, and look where they do."""
    names, sizes = ["ring_all_reduce", "tree_all_reduce"], tuple(4**k for k in range(3, 13))
    rows = world.run(bench.measure, "all_reduce", names, sizes)[0]
    found = by_algorithm(rows)
    faster = [size for size in sizes if found["tree_all_reduce", size].seconds < found["ring_all_reduce", size].seconds]
    for cores, how in ((None, "a core for each rank"), (detect().cores, f"ranks share {detect().cores} cores")):
        machine = cost.fit(rows, cores)
        predicted = cost.crossover("tree_all_reduce", "ring_all_reduce", world.size, machine)
        shown = "any size" if math.isinf(predicted) else bench.size(round(predicted))
        beta = f"1/beta {1e-9 / machine.beta:.2f} GB/s" if machine.beta else "beta 0"
        print(f"  model, {how}: alpha {machine.alpha * 1e6:.0f} µs, {beta}, off by {machine.residual:.0%};", end=" ")
        print(f"the tree is faster up to {shown}, and was up to {bench.size(max(faster)) if faster else 'no size'}")


def main() -> None:
    print(f"collectives: {os.cpu_count()} cores, float32, medians\n")
    for ranks in (4, 2):
        with World(ranks, timeout=300) as world:
            print(f"{ranks} ranks, over shared memory")
            for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
                rows = world.run(bench.measure, name, ["torch", "shared"], LARGE)[0]
                target = "to reach: 4" if name == "all_reduce" and ranks == 4 else ""
                print(f"  {name:<16}" + "; ".join(ratio(rows, "shared", nbytes) for nbytes in LARGE) + f"   {target}")
                if name == "all_reduce" and ranks == 2:
                    busbw = by_algorithm(rows)["shared", LARGE[1]].busbw
                    copy = copy_bandwidth(LARGE[1])
                    print(f"    busbw is {busbw / copy:.0%} of one core's memory copy rate   to reach: 80 %")
            print(f"{ranks} ranks, over messages")
            for name in ("ring_all_reduce", "halving_doubling_all_reduce"):
                rows = world.run(bench.measure, "all_reduce", ["torch", name], LARGE)[0]
                print(f"  {name:<28}" + "; ".join(ratio(rows, name, nbytes) for nbytes in LARGE))
            if ranks == 4:
                for who in ("torch", "ring"):
                    gather, scatter = (
                        world.run(bench.measure, name, [who if who == "torch" else f"ring_{name}"], LARGE[:1])[0][
                            0
                        ].busbw
                        for name in ("all_gather", "reduce_scatter")
                    )
                    print(f"  {who}: busbw of all_gather over that of reduce_scatter: {gather / scatter:.2f}")
                model(world)
            print()


if __name__ == "__main__":
    main()
