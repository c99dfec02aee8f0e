"""Published training runs: what people reached, with model, cluster and layout. One line of published_runs.csv is one.

Each line gives tokens per second, or TFLOP/s in a stated convention, or the time of a step; some give memory.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from lecture_lib.planner.cluster import Cluster
from lecture_lib.planner.estimate import Estimate
from lecture_lib.planner.layout import Layout
from lecture_lib.planner.model import Transformer
from lecture_lib.planner.numbers import missing, positive

RUNS = Path(__file__).with_name("published_runs.csv")
MODEL = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "gated", "vocab", "seq")
CLUSTER = ("gpu", "gpus", "gpus_per_node", "internode_gbps_per_gpu")
LAYOUT = (
    "dp",
    "tp",
    "pp",
    "cp",
    "virtual_stages",
    "zero_stage",
    "micro_batch",
    "global_batch",
    "recompute",
    "precision",
)
MEASURED = ("tokens_per_s_per_gpu", "tflops_per_gpu", "iteration_s", "memory_gib")


@dataclass(frozen=True)
class Run:
    """``measured``: what the line gives, by column. ``convention``: how its TFLOP/s were counted."""

    source: str
    model: Transformer
    cluster: Cluster
    layout: Layout
    convention: str
    measured: dict[str, float]

    @property
    def name(self) -> str:
        """ "mosaicml llm-foundry, 80 layers of 8192, 256 H100-80GB" """
        m, c = self.model, self.cluster
        return f"{self.source}, {m.layers} layers of {m.hidden}, {c.gpus} {c.gpu}"

    def tflops(self, estimate: Estimate) -> float:
        """The estimate's TFLOP/s per GPU in this line's convention."""
        return estimate.tflops_per_gpu(recomputation=self.convention.startswith("hardware"))

    def off(self, estimate: Estimate) -> float:
        """Predicted over measured step time, minus 1; from the most direct measure that the line gives."""
        if "iteration_s" in self.measured:
            return estimate.step_seconds / self.measured["iteration_s"] - 1
        if "tokens_per_s_per_gpu" in self.measured:
            return self.measured["tokens_per_s_per_gpu"] / estimate.tokens_per_second_per_gpu - 1
        return self.measured["tflops_per_gpu"] / self.tflops(estimate) - 1


def read(path: str | Path = RUNS) -> list[Run]:
    """All lines. Raises ValueError where one does not make sense."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> Run:
    measured = {name: positive(name, row[name]) for name in MEASURED if not missing(row[name])}
    return Run(
        row["source"],
        Transformer(**{name: row[name] for name in MODEL}),
        Cluster(**{name: row[name] for name in CLUSTER}),
        Layout(**{name: row[name] for name in LAYOUT}),
        row["flops_convention"],
        measured,
    )
