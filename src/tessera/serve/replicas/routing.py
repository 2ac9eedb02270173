"""Choose a replica for each request: prompts that begin alike go to the replica whose cache holds their first page.

    key       = blake2b(tenant, first characters or token ids of the prompt)
    preferred = the replica with the largest blake2b(key | number of the replica)
    fallback  = the less busy of two random replicas, chosen if `preferred` has over `margin` more open requests

If a replica is lost, only the prompts that prefer it move to other replicas.

Sources: rendezvous hashing (Thaler and Ravishankar 1998); the power of two choices (Mitzenmacher 2001).
"""

import hashlib
import json
import random
from collections.abc import Sequence

from tessera.serve.api.protocol import ChatBody, CompletionBody
from tessera.serve.replicas.supervisor import Replica

PAGE, CHARACTERS = 64, 256
"""Number of token ids, or of a text's characters, in the key: about the smallest page of any platform. Prompts that
share less gain nothing from a common replica."""


def first_page(body: CompletionBody | ChatBody, tenant: str = "") -> bytes | None:
    """Return the routing key of a request; None if its first prompt is shorter than a page.

    The key decides only where a request runs. It therefore ignores tools, and needs no tokenizer.
    """
    if isinstance(body, CompletionBody):
        prompt = body.prompts[0]
    else:
        prompt = "".join(text for message in body.messages for text in message.texts)
    length = CHARACTERS if isinstance(prompt, str) else PAGE
    if len(prompt) < length:
        return None
    return hashlib.blake2b(json.dumps([tenant, prompt[:length]]).encode()).digest()


def choose(key: bytes | None, replicas: Sequence[Replica], margin: int) -> Replica:
    """Return the replica for a request, out of those that are ready; with `key` None, none is preferred."""
    others = random.sample(replicas, min(2, len(replicas)))
    idle = min(others, key=lambda replica: replica.open)
    if key is None:
        return idle
    preferred = max(replicas, key=lambda replica: hashlib.blake2b(key + replica.index.to_bytes(4)).digest())
    return idle if preferred.open > idle.open + margin else preferred
