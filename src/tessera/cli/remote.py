"""`tessera chat --url`: connect to a server."""

from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import fields
from typing import Any

from tessera.cli.keys import read_keys

HERE = ("model", "attention", "plan", "dtype", "mesh", "kv_dtype", "weights", "parse_special")
"""Flags that apply to a model in this process. A server has loaded its model already, so --url refuses them."""


@contextmanager
def conversation(flags: Any, say: Callable[[str], Any]):
    """Connect to the server that the flags of `tessera chat` name, and open a conversation; `say` prints a remark."""
    from tessera.core.extras import require

    require("httpx2", "serve")
    from tessera.chat.remote import RemoteChat

    usual = {field.name: field.default for field in fields(flags)}
    for name in HERE:
        if getattr(flags, name) != usual[name]:
            flag = f"--{name.replace('_', '-')} {getattr(flags, name)}"
            raise ValueError(
                f"{flag} cannot be used with --url, because the server has already loaded its model: leave out {flag}"
            )
    options = flags.values()
    if flags.max_new_tokens is not None:
        options["max_tokens"] = flags.max_new_tokens
    key = None if flags.api_key_file is None else read_keys(flags.api_key_file)[0]
    chat = RemoteChat(flags.url, key=key, options=options, system=flags.system, seed=flags.seed)
    with closing(chat):
        chat.connect(say)
        yield chat
