"""The other process of ``probe.between_ranks``: receives a message in one of two ways and sends it back, until told to
stop. Run as a script by its path, so that it imports numpy and nothing else.

python echo.py ADDRESS_PORT SHARED_FD NBYTES
"""

import mmap
import socket
import sys

import numpy as np

SOCKET, SHARED, STOP = b"s", b"m", b"q"  # the first byte of every exchange: how the message travels


def receive(connection: socket.socket, buffer) -> None:
    """Fill all of ``buffer`` from the socket."""
    view = memoryview(buffer)
    while len(view):
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the other process has gone")
        view = view[got:]


def main(port: int, shared_fd: int, nbytes: int) -> None:
    shared = np.frombuffer(mmap.mmap(shared_fd, nbytes), np.uint8)
    own = np.zeros(nbytes, np.uint8)
    how, size = bytearray(1), bytearray(8)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            receive(connection, how)
            if how == STOP:
                return
            receive(connection, size)
            n = int.from_bytes(size, "little")
            if how == SOCKET:
                receive(connection, own[:n])
                connection.sendall(own[:n])
            else:
                own[:n] = shared[:n]
                shared[:n] = own[:n]
                connection.sendall(how)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
