"""The page at /: a chat with the model, and a live view of the server's metrics.

The page is one file that loads no other assets. Its Content-Security-Policy allows only its own script and style (by
hash), data: images and requests to this server. The browser therefore runs no script that a model writes.
"""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path


def page() -> tuple[str, dict[str, str]]:
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(html, "script"),
        "style-src": _hash(html, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return html, headers


def _hash(html: str, tag: str) -> str:
    """Return the CSP source expression that allows the page's only <`tag`> element."""
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
