"""Objects between the notebook and a rank, by value, over a private socket.

Functions and classes from a cell have no file that a rank could import, so they travel whole (cloudpickle). Large
arrays and tensors travel beside the pickle, not inside it (PEP 574), so that 3 GB is copied once and not four times.

A message on the socket:  number of parts | size of each part | pickle | array | array | ...
"""

import io
import pickle
import struct
import sys
import types
import weakref

import cloudpickle

_SMALL = 1 << 16  # joined into one write: each write may wake the reader, and a wake-up costs more than a copy
_CHUNK = 1 << 26  # some systems refuse a single write of more than 2 GiB

# A class from a cell must come back as that very class, or isinstance() in the notebook says no. So each one gets a
# number when the notebook sends it, and a rank that returns an instance sends the number, not the class.
_sent: list[type] = []  # notebook: number -> class
_received: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()  # rank: class -> number


def pack(obj, *, to_rank: bool = False) -> list:
    """The parts of the message that carries ``obj``. Raises what pickle raises when something cannot travel."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, buffers.append, to_rank).dump(obj)
    return [stream.getvalue(), *(buffer.raw() for buffer in buffers)]


def unpack(parts: list):
    return pickle.loads(parts[0], buffers=parts[1:])


def size(parts: list) -> int:
    """Bytes on the wire."""
    return sum(len(part) for part in parts)


def write(sock, parts: list) -> None:
    head = struct.pack(f"!{1 + len(parts)}Q", len(parts), *map(len, parts))
    if size(parts) <= _SMALL:
        sock.sendall(b"".join([head, *parts]))
        return
    sock.sendall(head)
    for part in parts:
        for start in range(0, len(part), _CHUNK):
            sock.sendall(memoryview(part)[start : start + _CHUNK])


def read(sock) -> list:
    """The parts of the next message. Raises EOFError when the other side is gone."""
    (count,) = struct.unpack("!Q", _read_exactly(sock, 8))
    sizes = struct.unpack(f"!{count}Q", _read_exactly(sock, 8 * count))
    return [_read_exactly(sock, n) for n in sizes]


def _read_exactly(sock, n: int) -> bytearray:
    data = bytearray(n)
    view = memoryview(data)
    while view:
        received = sock.recv_into(view[:_CHUNK])
        if not received:
            raise EOFError("the other process is gone")
        view = view[received:]
    return data


class _Pickler(cloudpickle.Pickler):
    def __init__(self, stream, buffer_callback, to_rank):
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)
        self.to_rank = to_rank

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            # cloudpickle forgets which file code came from; a traceback in a rank needs it to name the cell.
            make, args = self.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if a == "<dynamic-code>" else a for a in args)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return _reduce_tensor(torch, obj, keep_grad=self.to_rank)
        if isinstance(obj, types.FunctionType) and obj.__module__ == "IPython.core.display_functions":
            return _find, ("lecture_lib.launch.rank", obj.__name__)  # in a rank, display() must reach the notebook
        if isinstance(obj, type) and not self.to_rank and obj in _received:
            return _sent_class, (_received[obj],)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and self.to_rank and isinstance(reduced, tuple):
            make, args, *rest = reduced
            if vars(obj).get("__slots__"):  # cloudpickle sets it too late: the class would have a __dict__ as well
                args = tuple(a | {"__slots__": obj.__slots__} if isinstance(a, dict) else a for a in args)
            if obj not in _sent:
                _sent.append(obj)
            return _receive_class, (_sent.index(obj), make, args), *rest
        return reduced


def _find(module: str, name: str):
    __import__(module)
    return getattr(sys.modules[module], name)


def _receive_class(number: int, make, args):
    cls = make(*args)
    _received[cls] = number
    return cls


def _sent_class(number: int) -> type:
    return _sent[number]


def _reduce_tensor(torch, tensor, keep_grad: bool):
    parameter = isinstance(tensor, torch.nn.Parameter)
    grad = parameter and tensor.requires_grad or keep_grad and tensor.is_leaf and tensor.requires_grad
    if hasattr(tensor, "to_local"):  # DTensor: this rank's shard
        tensor = tensor.to_local()
    if hasattr(tensor, "trigger_wait"):  # the pending result of a functional collective
        tensor = tensor.trigger_wait()
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        if not keep_grad and not tensor.is_leaf:
            tensor = tensor.detach()
        return tensor.__reduce_ex__(5)  # torch's own way: right for everything, with more copies
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _rebuild_tensor, (
        pickle.PickleBuffer(data.view(torch.uint8).numpy()),
        tensor.dtype,
        tuple(tensor.shape),
        parameter,
        bool(grad),
    )


def _rebuild_tensor(buffer, dtype, shape, parameter, grad):
    import torch

    raw = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    return torch.nn.Parameter(tensor, requires_grad=grad) if parameter else tensor.requires_grad_(grad)
