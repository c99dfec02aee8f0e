"""Set the constants so that published runs are explained, and say how well runs are predicted that were left out.

    python -m lecture_lib.planner.calibrate           # fits, cross-validates, writes calibration.json

Fitted by least squares on logarithms: of predicted over measured step time, each in units of NOISE, and of each
constant over its prior, in units of its spread. So a constant that the runs say little about stays at its prior. Runs
that are far off count less than by their square (soft L1): some were slow for reasons of their own, which no column
tells.

The fit is deterministic. Errors that are reported are those of runs that had no part in the fit.
"""

import json
import math
import statistics
from collections.abc import Iterable

import numpy as np
from scipy.optimize import least_squares

from lecture_lib.planner.constants import CALIBRATION, CONSTANTS
from lecture_lib.planner.estimate import estimate
from lecture_lib.planner.published import Run, read

NOISE = 0.03  # how far apart two runs are that should be alike
NAMES = list(CONSTANTS)
PRIOR = np.log([c.prior for c in CONSTANTS.values()])
SPREAD = np.array([c.spread for c in CONSTANTS.values()])


def errors(runs: Iterable[Run], constants: dict) -> np.ndarray:
    """Predicted over measured step time, minus 1, of each run."""
    return np.array([run.off(estimate(run.model, run.cluster, run.layout, constants)) for run in runs])


def fit(runs: list[Run], start: dict | None = None) -> dict[str, float]:
    """The constants for these runs. ``start``: where to begin the search."""

    def residuals(logs):
        constants = dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
        squares = (np.log1p(errors(runs, constants)) / NOISE) ** 2
        return np.concatenate([np.sqrt(2 * (np.sqrt(1 + squares) - 1)), (logs - PRIOR) / SPREAD])

    begin = PRIOR if start is None else np.log([start[name] for name in NAMES])
    found = least_squares(residuals, begin, xtol=1e-4, ftol=1e-5)
    return {name: float(f"{math.exp(value):.4g}") for name, value in zip(NAMES, found.x, strict=True)}


def folds(runs: list[Run], k: int = 10, repeats: int = 3, seed: int = 0) -> list[list[int]]:
    """Numbers of the runs to leave out: k groups, ``repeats`` times."""
    random = np.random.default_rng(seed)
    orders = [random.permutation(len(runs)) for _ in range(repeats)]
    return [order[i::k].tolist() for order in orders for i in range(k)]


def groups(runs: list[Run], key) -> dict[str, list[int]]:
    """Numbers of the runs that are alike in ``key(run)``."""
    found: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        found.setdefault(key(run), []).append(i)
    return found


def left_out(runs: list[Run], groups: Iterable[list[int]], start: dict) -> np.ndarray:
    """For each group: the errors of its runs, with constants from all the others."""
    found = []
    for group in groups:
        rest = [run for i, run in enumerate(runs) if i not in set(group)]
        found.append(errors([runs[i] for i in group], fit(rest, start)))
    return np.concatenate(found)


def memory_errors(runs: list[Run], constants: dict) -> np.ndarray:
    """Predicted over reported memory, minus 1, of the runs that report it. No constant is fitted to it."""
    given = [run for run in runs if "memory_gib" in run.measured]
    found = [estimate(run.model, run.cluster, run.layout, constants).memory_gib for run in given]
    return np.array([gib / run.measured["memory_gib"] - 1 for gib, run in zip(found, given, strict=True)])


def summary(errors: np.ndarray) -> dict[str, float]:
    """Median and 90th percentile of the absolute errors, as shares."""
    size = np.abs(errors)
    return {
        "runs": len(size),
        "median": round(statistics.median(size.tolist()), 4),
        "90th percentile": round(float(np.quantile(size, 0.9)), 4),
    }


def main() -> None:
    runs = read()
    constants = fit(runs)
    report = {
        "fitted": summary(errors(runs, constants)),
        "ten folds, three times": summary(left_out(runs, folds(runs), constants)),
        "memory, not fitted": summary(memory_errors(runs, constants)),
    }
    CALIBRATION.write_text(json.dumps({"constants": constants, "errors": report}, indent=2) + "\n", encoding="utf-8")
    for name, value in constants.items():
        print(f"{name:<20}{value:>10.4g}   prior {CONSTANTS[name].prior:<8.4g}{CONSTANTS[name].meaning}")
    for name, errors_ in report.items():
        print(f"{name:<26}{errors_['median']:>7.1%} median{errors_['90th percentile']:>7.1%} 90th percentile")


if __name__ == "__main__":
    main()
