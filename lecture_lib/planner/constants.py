"""What datasheets do not say: the shares of their peaks that training reaches, and what overlaps.

Each constant has a prior, what one would guess before looking at any run, and a spread, by which factor the guess may
be off (one standard deviation of its logarithm). ``python -m lecture_lib.planner.calibrate`` moves them to where the
published runs are best explained without leaving the priors more than needed, and stores them in calibration.json.

None belongs to a run, a model or a source. Those with a GPU in their name are that GPU's.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

CALIBRATION = Path(__file__).with_name("calibration.json")


class Constant(NamedTuple):
    prior: float
    spread: float
    meaning: str


CONSTANTS = {
    "matmul A100 bf16": Constant(0.85, 0.15, "share of the peak that an endless matmul reaches; power limits clocks"),
    "matmul H100 bf16": Constant(0.70, 0.15, "the same"),
    "matmul H100 fp8": Constant(0.55, 0.20, "the same, of the fp8 peak"),
    "matmul traffic": Constant(1.5, 0.5, "times that a matmul's operands and result cross to memory, not overlapped"),
    "attention A100": Constant(0.40, 0.30, "share of the bf16 peak, FlashAttention of 2022, without its softmax"),
    "attention H100": Constant(0.22, 0.30, "the same; it does not use Hopper's own matrix instructions"),
    "flash2": Constant(1.8, 0.15, "FlashAttention-2 over FlashAttention; its paper says about 2"),
    "softmax": Constant(20.0, 0.5, "what softmax costs, as numbers more in a head"),
    "element-wise": Constant(1.3, 0.3, "bytes that norms, residuals and activations move, over those counted"),
    "layer seconds": Constant(100e-6, 0.7, "that a pass through a layer takes however small it is: launches, gaps"),
    "link": Constant(0.80, 0.10, "share of NVLink's rate that a collective reaches"),
    "network": Constant(0.85, 0.10, "share of the network's rate that a collective reaches"),
    "hop seconds": Constant(10e-6, 0.7, "alpha between nodes: of one step of a ring"),
    "not hidden": Constant(0.4, 0.25, "share of overlapped traffic that is paid anyway: it takes SMs and memory"),
    "stragglers": Constant(0.005, 0.7, "by which a step is longer with every doubling of the nodes: all wait for one"),
    "power": Constant(0.35, 0.30, "exponent: speed ~ (power limit / usual power) ^ this; 1/3 if power ~ clock cubed"),
}

# Fixed, because the runs cannot tell them apart from the above.
MEMORY_SHARE = 0.85  # of the memory's rate that a streaming kernel reaches
LINK_HOP = 2e-6  # seconds; alpha within a node
CALL = 10e-6  # seconds; of any collective, NCCL's launch
FRAGMENTATION = 0.03  # of activations and logits: held by PyTorch's allocator, and not usable


@functools.cache
def calibrated() -> dict[str, float]:
    """The constants as the published runs set them."""
    return json.loads(CALIBRATION.read_text(encoding="utf-8"))["constants"]
