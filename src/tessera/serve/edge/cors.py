"""Web pages that may use the server: browsers ask it which origins may send requests and read the answers (CORS).

An origin is a scheme, a host and a port, such as http://localhost:3000. Source: the Fetch standard, "CORS protocol".
"""

import re
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware

LOCAL = r"(?i:([a-z0-9-]+\.)*localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?"
"""Pattern of a host and port on this machine. Browsers resolve every name that ends with .localhost to it."""
ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^/?#@\s,*:\[\]]+)(?::(?P<port>[0-9]+))?"
)
"""Pattern of an origin that `--cors` may name."""
PORTS = {"http": "80", "https": "443"}
"""Scheme -> port that browsers leave out."""
DIFFERENT = {"ß", "ς", "\u200c", "\u200d"}
"""Characters that browsers encode by IDNA 2008, but Python by IDNA 2003."""
SHOWN = ("x-request-id", "retry-after")
"""Headers of an answer that a page may read, besides those that every page may."""
AGE_S = 600
"""Seconds for which a browser may keep the answer to its question whether a page may send a request."""


def origins(given: Iterable[str]) -> tuple[str, ...]:
    """Return the origins that `--cors` names, as browsers send them."""
    return tuple(_sent(each.strip().rstrip("/").lower()) for each in given)


def _sent(each: str) -> str:
    """Return an origin as browsers send it: with Punycode instead of other letters, and without the usual port."""
    if each == "*":
        return each
    if each == "null":
        raise ValueError("--cors null would let in every page on the web, by a sandboxed frame: use *, or an origin")
    found = ORIGIN.fullmatch(each)
    if found is None:
        raise ValueError(
            f"--cors {each!r:.200} is no origin: give scheme, host and port, such as https://chat.example.org, or *"
        )
    scheme, host, port = found["scheme"], found["host"], found["port"]
    if not host.isascii():
        try:
            host = "" if DIFFERENT & {*host} else host.encode("idna").decode()
        except UnicodeError:
            host = ""
        if not host:
            raise ValueError(f"--cors {each!r:.200} has a host that browsers write otherwise: give its xn-- form")
    return f"{scheme}://{host}" + ("" if port in (None, PORTS.get(scheme)) else f":{port}")


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
