"""Does it fit, how long does a step take, and where does the time go: ``estimate(model, cluster, layout)``.

    MFU = model FLOP / (time x peak)         model FLOP: each forward and backward pass counted once
    HFU = hardware FLOP / (time x peak)      with what recomputation does again

Model FLOP count attention "full" (all keys for each query), as Megatron-LM, PaLM and MosaicML publish them and as most
rows of published_runs.csv say; ``tflops_per_gpu("causal")`` counts the half that a causal mask leaves. Both divide by
the dense peak of the layout's precision, of a GPU that is not power limited (Chowdhery et al., PaLM, 2022, appendix B).
"""

import functools
from dataclasses import dataclass

from lecture_lib.hardware.specs import GIB
from lecture_lib.planner.cluster import Cluster
from lecture_lib.planner.constants import calibrated
from lecture_lib.planner.layout import Layout, complete
from lecture_lib.planner.memory import OUTSIDE, memory_bytes
from lecture_lib.planner.model import Transformer
from lecture_lib.planner.step import recomputed, step_seconds


@dataclass(frozen=True)
class Estimate:
    """What ``estimate`` found.

    layout: complete, with what was left open chosen. seconds: of one step, by part, on the slowest pipeline stage.
    bytes: on the fullest rank, by part. Both are what their sums are made of.
    """

    model: Transformer
    cluster: Cluster
    layout: Layout
    seconds: dict[str, float]
    bytes: dict[str, float]

    # ---- time --------------------------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_step(self) -> int:
        return self.layout.global_batch * self.model.seq

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.tokens_per_step / self.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.cluster.gpus

    def tflops_per_gpu(self, attention: str = "full", recomputation: bool = False) -> float:
        """1e12 FLOP per second and GPU in any convention: attention "full" or "causal"; with what is computed again, or
        without."""
        flops = self.model.flops_per_token(attention)
        if recomputation:
            parts = self.model.forward_flops(attention)
            matmuls, scores = recomputed(self.model, self.layout)
            flops += matmuls * (parts["attention projections"] + parts["mlp"]) + scores * parts["attention scores"]
        return flops * self.tokens_per_second_per_gpu / 1e12

    @property
    def model_tflops_per_gpu(self) -> float:
        """Attention counted "full", nothing counted twice."""
        return self.tflops_per_gpu()

    @property
    def hardware_tflops_per_gpu(self) -> float:
        """Attention counted "full", with what recomputation does again."""
        return self.tflops_per_gpu(recomputation=True)

    @property
    def mfu(self) -> float:
        return self.model_tflops_per_gpu * 1e12 / self.cluster.accelerator.peak(self.layout.precision)

    @property
    def hfu(self) -> float:
        return self.hardware_tflops_per_gpu * 1e12 / self.cluster.accelerator.peak(self.layout.precision)

    # ---- memory ------------------------------------------------------------------------------------------------------

    @property
    def memory_gib(self) -> float:
        """What PyTorch's allocator reserves at the peak, on the fullest rank."""
        return sum(self.bytes.values()) / GIB

    @property
    def fits(self) -> bool:
        """Together with 2 GiB for CUDA's context and NCCL's buffers."""
        return sum(self.bytes.values()) + OUTSIDE <= self.cluster.memory_bytes

    # ---- energy and money --------------------------------------------------------------------------------------------

    def days(self, tokens: float) -> float:
        """To train on so many tokens, without failures."""
        return tokens / self.tokens_per_second / 86400

    @property
    def joules_per_token(self) -> float | None:
        """Of the GPUs, each at its power limit; None if that is not published."""
        watts = self.cluster.accelerator.power_watts
        return None if watts is None else watts / self.tokens_per_second_per_gpu

    def megawatt_hours(self, tokens: float) -> float | None:
        """To train on so many tokens, GPUs only."""
        return None if self.joules_per_token is None else self.joules_per_token * tokens / 3.6e9

    def price(self, tokens: float) -> float | None:
        """To train on so many tokens, at the cluster's price for a GPU and hour; None without one."""
        rate = self.cluster.price_per_gpu_hour
        return None if rate is None else self.days(tokens) * 24 * self.cluster.gpus * rate

    # ---- words -------------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Sizes, time and memory by part, as text."""
        c, total = self.cluster, self.step_seconds
        shown = [
            f"{self.model.name}: {self.model.parameters / 1e9:.1f} billion parameters, sequences of {self.model.seq}",
            f"{c.gpus} x {c.gpu}, {c.gpus_per_node} to a node, {c.network * 8e-9:.0f} Gbit/s per GPU between nodes",
            f"{self.layout.axes()}, global batch {self.layout.global_batch}, {self.layout.attention} attention",
            "",
            f"{'seconds of a step':<28}{total:>10.3f}{'share':>8}",
            *(f"  {name:<26}{part:>10.3f}{part / total:>8.1%}" for name, part in self.seconds.items() if part),
            "",
            f"{'GiB on the fullest rank':<28}{self.memory_gib:>10.1f}"
            f"  of {c.memory_bytes / GIB:.0f}: {'fits' if self.fits else 'does not fit'}",
            *(f"  {name:<26}{part / GIB:>10.1f}" for name, part in self.bytes.items() if part),
            "",
            f"{'tokens/s per GPU':<28}{self.tokens_per_second_per_gpu:>10.0f}",
            f"{'model TFLOP/s per GPU':<28}{self.model_tflops_per_gpu:>10.1f}{self.mfu:>8.1%} MFU",
            f"{'hardware TFLOP/s per GPU':<28}{self.hardware_tflops_per_gpu:>10.1f}{self.hfu:>8.1%} HFU",
        ]
        return "\n".join(shown)

    def as_dict(self) -> dict:
        """Plain numbers and words, for JSON."""
        return {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "gpu": self.cluster.gpu,
            "gpus": self.cluster.gpus,
            "layout": dict(vars(self.layout)),
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "memory_gib": self.memory_gib,
            "gib": {name: part / GIB for name, part in self.bytes.items()},
            "fits": self.fits,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "hardware_tflops_per_gpu": self.hardware_tflops_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
        }


def estimate(model: Transformer, cluster: Cluster, layout: Layout, constants: dict | None = None) -> Estimate:
    """Memory and time of one training step, on paper.

    What ``layout`` leaves open is chosen: the fastest virtual stages, and the fastest micro-batch that fits, or the
    smallest, if none does.
    ``constants``: those of constants.py, if not as calibrated. Raises ValueError for a layout that cannot run; one that
    does not fit is no error, see ``Estimate.fits``.
    """
    constants = calibrated() if constants is None else constants
    found: dict[int, Estimate] = {}  # by micro-batch, with the fastest virtual stages
    for each, nbytes in _possible(model, cluster, layout):
        e = Estimate(model, cluster, each, step_seconds(model, cluster, each, constants), dict(nbytes))
        other = found.get(each.micro_batch)
        if other is None or e.step_seconds < other.step_seconds:
            found[each.micro_batch] = e
    fit = [e for e in found.values() if e.fits]
    return min(fit, key=lambda e: e.step_seconds) if fit else found[min(found)]


@functools.lru_cache(maxsize=1024)
def _possible(model: Transformer, cluster: Cluster, layout: Layout) -> list[tuple[Layout, dict[str, float]]]:
    """The complete layouts and their bytes: no constant changes them, and a fit asks for the same hundreds of times."""
    return [(each, memory_bytes(model, each)) for each in complete(model, cluster, layout)]
