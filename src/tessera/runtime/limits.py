"""A limit that requests, programs and HTTP bodies share. It is here because a worker process must not import JAX."""

RANKS = 20
"""Number of best tokens that a step with `sampling.Method.extra` returns."""
