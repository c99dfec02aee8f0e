"""How far off the planner is for runs that had no part in its fit, beside two peers on the same runs; and its speed.

python -m tests.bench.planner
"""

import statistics

import numpy as np

from lecture_lib.planner import Cluster, Layout, best, estimate, preset
from lecture_lib.planner.calibrate import errors, folds, groups, left_out, memory_errors, summary
from lecture_lib.planner.constants import calibrated
from lecture_lib.planner.published import Run, read
from tests.bench import median
from tests.test_planner_published import HELD_OUT

REPEATS = 2


def line(name: str, found: np.ndarray, target: str = "") -> None:
    s = summary(found)
    shown = f"{s['runs']:>5} runs{s['median']:>8.1%} median{s['90th percentile']:>8.1%} 90th percentile"
    print(f"  {name:<44}{shown}   {target}".rstrip())


def one_mfu(runs: list[Run], groups_: list[list[int]]) -> np.ndarray:
    """The first peer: every GPU and precision has one constant model TFLOP/s, the median of the other runs'."""
    rates = np.array([_model_tflops(run) for run in runs])
    kinds = [(run.cluster.accelerator.name, run.layout.precision) for run in runs]
    found = []
    for group in groups_:
        for i in group:
            rest = [j for j in range(len(runs)) if j not in group]
            same = [rates[j] for j in rest if kinds[j] == kinds[i]] or [rates[j] for j in rest]
            found.append(rates[i] / statistics.median(same) - 1)
    return np.array(found)


def regression(runs: list[Run], groups_: list[list[int]]) -> np.ndarray:
    """The second peer: least squares of log TFLOP/s on logarithms of the columns, which explains nothing."""

    def features(run: Run) -> list[float]:
        m, c, x = run.model, run.cluster, run.layout
        logs = [m.layers, m.hidden, m.seq, c.gpus, x.tp, x.pp, x.micro_batch or 1, x.global_batch / c.gpus]
        kinds = [c.accelerator.name == "A100", c.memory_bytes < 50 * 2**30, x.precision == "fp8"]
        return [1.0, *np.log(logs), *map(float, kinds), float(x.recompute == "full"), np.log(m.seq) ** 2 / 10]

    design = np.array([features(run) for run in runs])
    logs = np.log([_model_tflops(run) for run in runs])
    found = []
    for group in groups_:
        rest = [j for j in range(len(runs)) if j not in group]
        ridge = np.vstack([design[rest], 0.1 * np.eye(design.shape[1])])
        weights, *_ = np.linalg.lstsq(ridge, np.concatenate([logs[rest], np.zeros(design.shape[1])]), rcond=None)
        found.append(np.exp(logs[group] - design[group] @ weights) - 1)
    return np.concatenate(found)


def _model_tflops(run: Run) -> float:
    """What the run measured, in one convention."""
    e = estimate(run.model, run.cluster, run.layout)
    return e.model_tflops_per_gpu * (1 + run.off(e))


def main() -> None:
    runs, constants = read(), calibrated()
    print(f"planner: step time of {len(runs)} published runs, absolute errors\n")
    line("fitted to all of them", errors(runs, constants))
    ten = folds(runs, repeats=REPEATS)
    line(f"left out of the fit, 10 folds, {REPEATS} times", left_out(runs, ten, constants), "to reach: 5 % and 12 %")
    for name, key in (
        ("source", lambda run: run.source),
        ("GPU", lambda run: run.cluster.gpu),
        ("width of the model", lambda run: str(run.model.hidden)),
    ):
        print(f"  left out of the fit, all runs with the same {name}")
        for value, group in groups(runs, key).items():
            line(f"  {value}", left_out(runs, [group], constants))
    print("  in no line of published_runs.csv: further rows of the same tables")
    for source, found in HELD_OUT.items():
        line(f"  {source}", np.array([off for _, off, _ in found]))
    line(
        "  all of them", np.array([off for found in HELD_OUT.values() for _, off, _ in found]), "to reach: 5 % and 12 %"
    )
    line("peer: one TFLOP/s per GPU and precision", one_mfu(runs, ten))
    line("peer: regression on 14 features", regression(runs, ten))
    line("memory, where it is given", memory_errors(runs, constants), "to reach: 10 %")

    model, cluster = preset("llama3-405b"), Cluster("H100", 16384)
    layout = Layout(tp=8, pp=16, virtual_stages=8, micro_batch=1, global_batch=2048, zero_stage=1)
    one = median(lambda: estimate(model, cluster, layout), 200)
    print(f"\n  one estimate {one * 1e3:.2f} ms   to stay under: 20 ms")
    plans, seconds = best(model, cluster, 2048), median(lambda: best(model, cluster, 2048), 3)
    print(f"  search, 405B on 16,384 GPUs: {plans.tried} layouts in {seconds:.2f} s   to reach: 1 s")
    print(f"  the layout of Llama 3 is number {plans.rank(tp=8, pp=16, cp=1)} of {len(plans)} that fit")


if __name__ == "__main__":
    main()
