"""Choice of a replica: prompts with the same first page go to the same replica, which has its keys in its cache.

    key       = blake2b(tenant | tokens of the first page)
    preferred = the replica with the largest blake2b(key | its number): if one is lost, only its prompts move
    fallback  = the less busy of two random replicas, if the preferred one has over `margin` more open requests

Sources: rendezvous hashing (Thaler and Ravishankar 1998); the power of two choices (Mitzenmacher 2001).
"""

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tessera.models.tokenizer import Tokenizer
from tessera.serve.protocol import ChatBody, CompletionBody

PAGE = 64
"""Tokens of the routing key: the smallest page of any platform, so that prompts that share a page share their key."""
CHARACTERS = 2048
"""Characters of a prompt, or of all messages, to encode for the key: 64 tokens are seldom more, and encoding a book
would take seconds, while other requests wait."""


class Choice(Protocol):
    """The fields of a replica on which its choice depends."""

    index: int
    open: int


def first_page(body: CompletionBody | ChatBody, tokenizer: Tokenizer | None, tenant: str = "") -> bytes | None:
    """Return the routing key of a request; None if its first prompt is shorter than a page, or cannot be encoded.

    Tenants share no pages, so their keys differ. The key decides only where a request runs, so it leaves out tools, and
    text beyond `CHARACTERS`.
    """
    try:
        tokens = _tokens(body, tokenizer)
    except (ValueError, RecursionError):  # the replica refuses the conversation, and says why
        return None
    if len(tokens) < PAGE:
        return None
    return hashlib.blake2b(tenant.encode() + b"|" + np.asarray(tokens[:PAGE], "<u4").tobytes()).digest()


def choose[R: Choice](key: bytes | None, replicas: Sequence[R], margin: int) -> R:
    """Return the replica for a request.

    Args:
        key: the request's key; None lets any replica answer.
        replicas: replicas that are ready; at least one.
        margin: how many more open requests the preferred replica may have than another.
    """
    others = random.sample(replicas, min(2, len(replicas)))
    idle = min(others, key=lambda replica: replica.open)
    if key is None:
        return idle
    preferred = max(replicas, key=lambda replica: hashlib.blake2b(key + replica.index.to_bytes(4)).digest())
    return idle if preferred.open > idle.open + margin else preferred


def _tokens(body: CompletionBody | ChatBody, tokenizer: Tokenizer | None) -> Sequence[int]:
    if isinstance(body, CompletionBody):
        prompt = body.prompts[0]
        if not isinstance(prompt, str):
            return prompt
        return [] if tokenizer is None else tokenizer.encode(prompt[:CHARACTERS])
    if tokenizer is None:
        return []
    return tokenizer.encode_chat(_cut([message.plain() for message in body.messages]))


def _cut(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all messages, with the first `CHARACTERS` of their texts and calls."""
    found, left = [], CHARACTERS
    for message in messages:
        calls = json.dumps(message.get("tool_calls", []))
        kept = message if len(calls) <= left else {k: v for k, v in message.items() if k != "tool_calls"}
        left -= len(calls) if "tool_calls" in kept else 0
        found.append(kept | {"content": message["content"][:left]})
        left -= len(found[-1]["content"])
    return found
