"""A program of a peer that a test compiles in another process."""

import jax

from lab.bench import peers


def splash(length, dtype):
    """Build the peer of dense prefill as `lab bench` compiles it, with 2 heads over 1."""

    def attend(q, k, v):
        with peers.exact(dtype):
            return peers.splash(q, k, v)

    return attend, [jax.ShapeDtypeStruct((1, length, heads, 128), dtype) for heads in (2, 1, 1)]
