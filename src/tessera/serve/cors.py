"""Web pages that may use the server: browsers ask it which origins may send requests and read the answers (CORS).

An origin is a scheme, a host and a port, such as http://localhost:3000. Source: the Fetch standard, "CORS protocol".
"""

import re
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware

LOCAL = r"(?i:localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?"
"""Pattern of a host and port on this machine."""
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,*]+")
"""Pattern of an origin that `--cors` may name."""
SHOWN = ("x-request-id", "retry-after")
"""Headers of an answer that a page may read, besides those that every page may."""
AGE_S = 600
"""Seconds for which a browser may keep the answer to its question whether a page may send a request."""


def origins(given: Iterable[str]) -> tuple[str, ...]:
    """Return the origins that `--cors` names, in the form in which browsers send them.

    Raises:
        ValueError: one is neither an origin nor "*".
    """
    found = tuple(each.strip().rstrip("/").lower() for each in given)
    for each in found:
        if each == "null":
            raise ValueError(
                "--cors null would let in every page on the web, by a sandboxed frame: use *, or an origin"
            )
        if each != "*" and not ORIGIN.fullmatch(each):
            raise ValueError(
                f"--cors {each!r:.200} is no origin: give scheme, host and port, such as https://chat.example.org, or *"
            )
    return found


class Cors(CORSMiddleware):
    """ASGI middleware that answers a browser's questions, without a key, and tells it which pages may read an answer.

    Pages of this machine may always; `allowed` holds the other origins, and "*" allows every page.
    """

    def __init__(self, app, allowed: Iterable[str] = ()):
        super().__init__(
            app,
            allow_origins=tuple(allowed),
            allow_origin_regex=rf"https?://{LOCAL}",
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,  # a page of another network, once --cors names it
            expose_headers=SHOWN,
            max_age=AGE_S,
        )
