"""Which backend and which device a rank gets. The one place that decides it."""

BACKENDS = ("auto", "gloo", "nccl", None)


def choose(size: int, backend: str | None, device: str, rank: int, gpus: int):
    """(backend, torch.device) for ``rank`` of ``size`` on a machine with ``gpus`` GPUs.

    backend "auto" is nccl with one GPU per rank where there are enough, else gloo on CPU. Ranks that share one GPU
    (device="cuda:0") use gloo, since NCCL refuses two ranks on one GPU. Raises ValueError where there are too few GPUs.
    """
    import torch

    shared = ":" in device  # one GPU was named, so all ranks use it
    if device == "auto":
        one_gpu_each = backend == "nccl" or (backend != "gloo" and gpus >= size)
        device = f"cuda:{rank}" if one_gpu_each else "cpu"
    elif device == "cuda":
        device = f"cuda:{rank}"
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is not None and chosen.index >= gpus or backend == "nccl" and gpus < size:
        needed = size if backend == "nccl" or chosen.index == rank else chosen.index + 1
        raise ValueError(
            f"{size} ranks with backend={backend!r} and device={device!r} need {needed} GPUs, and this machine has "
            f"{gpus}. Use World({size}) to run on CPU" + (", or device='cuda:0' to share one GPU." if gpus else ".")
        )
    if backend == "auto":
        backend = "nccl" if chosen.type == "cuda" and not shared else "gloo"
    return backend, chosen
