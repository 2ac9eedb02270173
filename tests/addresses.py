"""Addresses for several processes over loopback."""

import socket


def free_address() -> str:
    """Return an address on this machine whose port, and the next one, nothing uses."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("localhost", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("localhost", port + 1))
            except OSError:
                continue
            return f"localhost:{port}"
