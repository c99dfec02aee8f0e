"""The planner against runs that people published: what it was fitted to, and, which counts, what it was not."""

import json
from collections import Counter
from importlib import resources

import numpy as np
import pytest

from lecture_lib.planner.calibrate import errors, fit, folds, groups, left_out, memory_errors, summary
from lecture_lib.planner.constants import CALIBRATION, CONSTANTS, calibrated
from lecture_lib.planner.estimate import estimate
from lecture_lib.planner.published import read

RUNS = read()


def test_all_runs_are_read_and_lie_beside_the_code():
    assert resources.files("lecture_lib.planner").joinpath("published_runs.csv").is_file()
    assert len(RUNS) == 87 and sum("memory_gib" in run.measured for run in RUNS) == 4
    assert Counter(run.source.split()[0] for run in RUNS) == {"mosaicml": 76, "arXiv": 7, "torchtitan": 4}
    for run in RUNS:
        e = estimate(run.model, run.cluster, run.layout)
        assert e.layout.ranks == run.cluster.gpus


def test_where_a_run_gives_two_measures_they_agree():
    both = [run for run in RUNS if {"tokens_per_s_per_gpu", "tflops_per_gpu"} <= set(run.measured)]
    assert len(both) == 76
    for run in both:
        m = run.model
        # Their count has the learned positions among the parameters that a token meets.
        flops = m.flops_per_token("full") + 6 * m.seq * m.hidden
        assert run.measured["tokens_per_s_per_gpu"] * flops / 1e12 == pytest.approx(
            run.measured["tflops_per_gpu"], rel=2e-3
        )


def test_almost_all_runs_fit_where_they_ran():
    out = [run.name for run in RUNS if not estimate(run.model, run.cluster, run.layout).fits]
    assert len(out) <= 0.02 * len(RUNS), out


def test_memory_is_within_ten_percent_where_it_is_given():
    assert np.abs(memory_errors(RUNS, calibrated())).max() < 0.10


def test_constants_are_those_that_the_fit_finds_and_stay_near_their_priors():
    stored, found = calibrated(), fit(RUNS)
    assert list(stored) == list(found) == list(CONSTANTS)
    for name, value in found.items():
        assert stored[name] == pytest.approx(value, rel=0.02)
        constant = CONSTANTS[name]
        assert abs(np.log(value / constant.prior)) < 3 * constant.spread, name
        assert "share" not in constant.meaning or value < 1


def test_stored_errors_keep_what_is_promised():
    report = json.loads(CALIBRATION.read_text())["errors"]
    assert report["fitted"] == summary(errors(RUNS, calibrated()))
    kept = report["ten folds, three times"]
    assert kept["runs"] == 3 * 87 and kept["median"] <= 0.05 and kept["90th percentile"] <= 0.12


def test_runs_that_were_left_out_are_predicted():
    found = summary(left_out(RUNS, folds(RUNS, k=4, repeats=1), calibrated()))
    assert found["runs"] == 87 and found["median"] <= 0.05 and found["90th percentile"] <= 0.12


def test_a_source_that_was_left_out_is_predicted():
    for source, numbers in groups(RUNS, lambda run: run.source).items():
        found = summary(left_out(RUNS, [numbers], calibrated()))
        assert found["median"] < 0.10 and found["90th percentile"] < 0.15, source


def test_a_wrong_model_would_be_seen():
    slow = calibrated() | {"matmul A100 bf16": 0.5}
    assert summary(errors(RUNS, slow))["median"] > 0.12


def test_folds_leave_each_run_out_once_a_round():
    for k, repeats in ((10, 3), (4, 1)):
        found = Counter(i for group in folds(RUNS, k, repeats) for i in group)
        assert found == dict.fromkeys(range(87), repeats)
    assert folds(RUNS) == folds(RUNS)
