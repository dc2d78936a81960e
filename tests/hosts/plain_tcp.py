"""Plain TCP between two processes that do nothing else, as the measure of a wire.

python plain_tcp.py receive ADDRESS PORT               # prints "ready" when it listens
python plain_tcp.py send ADDRESS PORT NUM_BYTES        # prints seconds
"""

from __future__ import annotations

import socket
import sys
import time


def receive(address: str, port: int) -> None:
    with socket.create_server((address, port)) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 20):
                pass
            connection.sendall(b".")


def send(address: str, port: int, num_bytes: int) -> None:
    """Seconds from the first byte until the other side says that it has the last one."""
    piece = bytes(1 << 16)
    with socket.create_connection((address, port)) as connection:
        began = time.monotonic()
        for offset in range(0, num_bytes, len(piece)):
            connection.sendall(piece[: num_bytes - offset])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        sys.stdout.write(f"{time.monotonic() - began:.4f}\n")


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
