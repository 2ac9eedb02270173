"""Choose a replica for each request: prompts with the same first page go to the replica whose cache holds that page.

    key       = blake2b(tenant | tokens of the first page)
    preferred = the replica with the largest blake2b(key | number of the replica)
    fallback  = the less busy of two random replicas, chosen if `preferred` has over `margin` more open requests

If a replica is lost, only the prompts that prefer it move to other replicas.

Sources: rendezvous hashing (Thaler and Ravishankar 1998); the power of two choices (Mitzenmacher 2001).
"""

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.models.text.tokenizer import Tokenizer
from tessera.serve.api.protocol import ChatBody, CompletionBody
from tessera.serve.api.tools import encode
from tessera.serve.replicas.supervisor import Replica

PAGE = 64
"""Number of tokens in the routing key: the smallest page of any platform. Prompts that share a page thus have equal
routing keys."""
CHARACTERS = 2048
"""Maximum characters of a prompt, or of all messages together, to encode for the routing key. The first 64 tokens are
seldom longer, and encoding a book would take seconds while other requests wait."""


def first_page(body: CompletionBody | ChatBody, tokenizer: Tokenizer | None, tenant: str = "") -> bytes | None:
    """Return the routing key of a request; None if its first prompt is shorter than a page, or cannot be encoded.

    The key decides only where a request runs, so it ignores tools, and all but the first `CHARACTERS` characters.
    """
    try:
        tokens = _tokens(body, tokenizer)
    except (ValueError, RecursionError):  # the replica refuses the conversation, and says why
        return None
    if len(tokens) < PAGE:
        return None
    return hashlib.blake2b(tenant.encode() + b"|" + np.asarray(tokens[:PAGE], "<u4").tobytes()).digest()


def choose(key: bytes | None, replicas: Sequence[Replica], margin: int) -> Replica:
    """Return the replica for a request, out of those that are ready; with `key` None, none is preferred."""
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
            return prompt if all(isinstance(part, int) for part in prompt[:PAGE]) else []
        return [] if tokenizer is None else tokenizer.encode(prompt[:CHARACTERS])
    if tokenizer is None:
        return []
    return encode(tokenizer, _cut([message.plain() for message in body.messages]), [])


def _cut(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all messages, but only the first `CHARACTERS` characters of their texts and tool calls together."""
    found, left = [], CHARACTERS
    for message in messages:
        calls = json.dumps(message.get("tool_calls", []))
        kept = message if len(calls) <= left else {k: v for k, v in message.items() if k != "tool_calls"}
        left -= len(calls) if "tool_calls" in kept else 0
        found.append(kept | {"content": message["content"] and message["content"][:left]})
        left -= len(found[-1]["content"] or "")
    return found
