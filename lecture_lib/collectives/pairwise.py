"""All-to-all, one partner at a time: in step k every rank sends to the rank k ahead and hears from the rank k behind.

No rank is anyone's target twice in a step, so no link is crowded, whatever the number of ranks.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from lecture_lib.collectives.agreement import collective
from lecture_lib.collectives.exchange import exchange, place


@collective
def pairwise_all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """n - 1 steps; each rank sends n - 1 messages, (n-1)/n S if the pieces are equal.

    input (rows, ...), of which the first input_split_sizes[0] rows go to rank 0, and so on -> output (rows, ...).
    """
    n, rank = place(group)
    outgoing = input.split(input_split_sizes or [input.shape[0] // n] * n)
    incoming = output.split(output_split_sizes or [output.shape[0] // n] * n)
    incoming[rank].copy_(outgoing[rank])
    for step in range(1, n):
        ahead, behind = (rank + step) % n, (rank - step) % n
        exchange(group, sends=[(outgoing[ahead], ahead)], receives=[(incoming[behind], behind)])
