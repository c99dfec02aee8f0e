"""FLOP of a step, by the formulas of torch.utils.flop_counter."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


class Flops(TorchDispatchMode):
    """Counts the ``flops`` of all operators in a block. torch's FlopCounterMode counts them by module too, and so holds
    on to activations, which are to be counted in the same step."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if formula := FORMULAS.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


# torch counts all scores of attention, and none on a CPU; with a causal mask half of them are computed.
def of_attention(query, key, value, dropout_p=0.0, is_causal=False, *_, **__) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape) // (1 + is_causal)


def of_attention_backward(gradient, query, key, value, *rest, is_causal=None, **__) -> int:
    if is_causal is None:
        is_causal = rest[3 if len(rest) < 7 else 7]  # after dropout_p, which the GPU's has later
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape) // (1 + is_causal)


FORMULAS = flop_registry | {
    torch.ops.aten._scaled_dot_product_flash_attention: of_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: of_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: of_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: of_attention_backward,
}
