"""Store, recompute, or communicate: three ways to have an activation when the backward pass asks for it.

    world.run(tradeoff)[0]                       # rows; print(tradeoff_table(rows))

One step of the same model on the same batch. The loss is the same in every row, and so are the gradients; what differs
is the most that a rank holds, what all ranks compute together, and what a rank sends.
"""

import argparse
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lecture_lib.parallel.model import Transformer, next_token_loss
from lecture_lib.parallel.recompute import recompute
from lecture_lib.trace import ledger, memory, unrecorded
from lecture_lib.train.loop import PRECISIONS, build, device_of_ranks, model_of
from lecture_lib.train.options import options as parse
from lecture_lib.train.text import batch_of, read


class Row(NamedTuple):
    """A way to have the activations.

    ranks:             over how many ranks one sample is spread
    activation_bytes:  the most that a rank held at any time, on the rank with most; by lecture_lib.trace.memory
    flops:             of a step, of all ranks that share the sample; by the formulas of torch.utils.flop_counter
    bytes_sent:        of a step, by the rank that sent most; by lecture_lib.trace.ledger
    loss:              nats
    """

    way: str
    ranks: int
    activation_bytes: int
    flops: int
    bytes_sent: int | Fraction
    loss: float


def tradeoff(options: argparse.Namespace | None = None) -> list[Row]:
    """Runs on every rank of a world; every rank gets the same rows. Options: the model, the batch and the precision.

    Store, and recompute: each rank does all of it by itself. Communicate: one sample is spread over all ranks, by
    tensor parallelism without and with sequence parallelism, or by context parallelism.
    """
    options = _changed(options or parse("--layers 2 --batch 4"), {"dropout": 0.0, "micro_batches": 1})
    rank, n = dist.get_rank(), dist.get_world_size()
    alone = [
        ("store everything", {}),
        ("recompute selectively", {"recompute": "selective"}),
        ("recompute blocks", {"recompute": "full"}),
    ]
    together = [
        (f"tensor parallel, tp={n}", {"tp": n}),
        (f"and sequence parallel, tp={n}", {"tp": n, "sequence_parallel": True}),
        (f"and recompute blocks, tp={n}", {"tp": n, "sequence_parallel": True, "recompute": "full"}),
        (f"context parallel, cp={n}", {"cp": n}),
    ]
    tokens, targets = batch_of(
        read(options.data, options.seq + 1), 0, batch=options.batch, seq=options.seq, seed=options.seed
    )
    mine = [_alone(way, _changed(options, changes), tokens, targets) for way, changes in alone[rank::n]]
    rows = _everyone(mine)  # the ranks have shared the work
    rows = [rows[i % n][i // n] for i in range(len(alone))]
    return rows + [_together(way, _changed(options, changes)) for way, changes in together]


def _changed(options: argparse.Namespace, changes: dict) -> argparse.Namespace:
    return argparse.Namespace(**vars(options) | changes)


def _alone(way: str, options: argparse.Namespace, tokens: Tensor, targets: Tensor) -> Row:
    """The model in one process, on this rank."""
    with torch.device("cpu"):
        torch.manual_seed(options.seed)
        model = Transformer(**model_of(options))
    device = device_of_ranks()
    for block in model.to(device).blocks:
        recompute(block, options.recompute)

    compute_dtype = PRECISIONS[options.precision]

    def step() -> Tensor:
        with torch.autocast(device.type, compute_dtype, enabled=compute_dtype is not None):
            loss = next_token_loss(model(tokens.to(device)).float(), targets.to(device))
        loss.backward()
        return loss.detach()

    return Row(way, 1, *_count(model, step))


def _together(way: str, options: argparse.Namespace) -> Row:
    """The model on all ranks."""
    mesh, model, _, batch = build(options)
    module = nn.ModuleList(model.stages.values())
    if mesh.size["cp"] > 1:  # the first step makes the buckets that gradients travel in; they are no activations
        model.step(*batch(0))
        module.zero_grad()
    *mine, loss = _count(module, lambda: model.step(*batch(0)))
    mesh.close()
    activations, flops, sent = zip(*_everyone(mine))
    return Row(way, len(flops), max(activations), sum(flops), max(sent), loss)


def _count(module: nn.Module, step: Callable[[], Tensor]) -> tuple[int, int, int | Fraction, float]:
    """(most bytes of activations, FLOP, bytes sent, loss) of a step on this rank."""
    from lecture_lib.train.flops import Flops  # imports Triton, half a second that a notebook need not wait

    with ledger() as led, Flops() as counted, memory(module) as held:
        loss = step()
    return held.peak["activations"], counted.flops, led.bytes_sent, loss.item()


def _everyone(mine) -> list:
    """What every rank brings, by rank."""
    brought: list = [None] * dist.get_world_size()
    with unrecorded():
        dist.all_gather_object(brought, mine)
    return brought


def tradeoff_table(rows: Iterable[Row]) -> str:
    """As text; FLOP as a multiple of the first row's, and whether the loss is the first row's."""
    first, *_ = rows = list(rows)
    lines = [f"{'way':<32}{'held, MB':>10}{'FLOP':>8}{'sent, MB':>10}{'loss':>8}"]
    for row in rows:
        loss = "same" if abs(row.loss - first.loss) < 1e-4 * first.loss else "other"
        lines.append(
            f"{row.way:<32}{row.activation_bytes / 1e6:>10.2f}{row.flops / first.flops:>8.3f}"
            f"{float(row.bytes_sent) / 1e6:>10.2f}{loss:>8}"
        )
    return "\n".join(lines)
