"""Pictures of the course. Each one also says in one line of text what it shows.

from lecture_lib.figures import picture
picture("all_reduce")           # in a notebook: the drawing; as text: its numbers in words

python -m lecture_lib.figures   # draw all of them into assets/
"""

from collections.abc import Callable

from . import collectives as c
from .barrier import barrier
from .context import causal_work, tokens_and_heads
from .cuts import four_cuts
from .data_parallel import data_parallel, layers_held, zero
from .energy import energy
from .exchange import exchange
from .expert import experts
from .fabric import nodes, rack
from .fusion import fusion
from .ladder import ladder
from .layouts import mesh, three_ways
from .palette import PALETTE, rank_color
from .pipeline_parts import backward_in_two, gpipe_and_1f1b, interleaving, pipeline_cut, zero_bubble
from .roofline import of_a_layer, roofline
from .sharding import moves, placements, placements_2d
from .steps import ladders
from .svg import Figure
from .tensor_parallel import column_then_row, f_and_g, heads, matmul_splits, sequence_parallel
from .tiles import tiles
from .topology import ring, shared_memory, tree
from .world import world

__all__ = ["FIGURES", "PALETTE", "Figure", "picture", "rank_color"]

# One function for each file in assets/. Drawing takes milliseconds, so nothing is drawn before it is asked for.
FIGURES: dict[str, Callable[[str], Figure]] = {
    "ladder": ladder,
    "ladders": ladders,
    "roofline": lambda name: roofline(name, of_a_layer(tokens=4096, width=4096), "H100"),
    "tiles": tiles,
    "fusion": fusion,
    "nodes": nodes,
    "rack": rack,
    "energy": energy,
    "world": world,
    "broadcast": lambda name: exchange(name, "Broadcast", c.root_only(), c.broadcast),
    "scatter": lambda name: exchange(name, "Scatter", c.root_only(), c.scatter, to=True),
    "gather": lambda name: exchange(name, "Gather", c.pieces(), c.gather, source=True),
    "reduce": lambda name: exchange(name, "Reduce", c.addends(), c.reduce),
    "all_gather": lambda name: exchange(name, "All-gather", c.pieces(), c.all_gather, source=True),
    "reduce_scatter": lambda name: exchange(name, "Reduce-scatter", c.addends(), c.reduce_scatter, to=True),
    "all_reduce": lambda name: exchange(name, "All-reduce", c.addends(), c.all_reduce),
    "all_reduce_as_two": lambda name: exchange(
        name, "All-reduce in two steps", c.addends(), c.reduce_scatter, c.all_gather
    ),
    "broadcast_as_two": lambda name: exchange(name, "Broadcast in two steps", c.root_only(), c.scatter, c.all_gather),
    "all_to_all": lambda name: exchange(name, "All-to-all", c.everyone(), c.all_to_all, to=True, source=True),
    "barrier": barrier,
    "send_recv": lambda name: exchange(name, "Send and receive", c.everyone(), c.send_recv),
    "ring": ring,
    "tree": tree,
    "shared_memory": shared_memory,
    "data_parallel": data_parallel,
    "zero": zero,
    "layers_held": layers_held,
    "matmul_splits": matmul_splits,
    "column_then_row": column_then_row,
    "f_and_g": f_and_g,
    "heads": heads,
    "sequence_parallel": sequence_parallel,
    "pipeline_cut": pipeline_cut,
    "gpipe_and_1f1b": gpipe_and_1f1b,
    "interleaving": interleaving,
    "backward_in_two": backward_in_two,
    "zero_bubble": zero_bubble,
    "placements": placements,
    "placements_2d": placements_2d,
    "moves": moves,
    "four_cuts": four_cuts,
    "mesh": mesh,
    "three_ways": three_ways,
    "causal_work": causal_work,
    "tokens_and_heads": tokens_and_heads,
    "experts": experts,
    "batch_send_recv": lambda name: exchange(name, "Batched send and receive", c.everyone(), c.batch_send_recv),
}


def picture(name: str) -> Figure:
    """The picture of that name. Raises KeyError for a name that FIGURES lacks."""
    return FIGURES[name](name)
