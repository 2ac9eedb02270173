"""Limits that requests, programs and HTTP bodies share; this module imports nothing, so a worker can read it fast."""

RANKS = 20
"""Number of best tokens that a step with `sampling.Method.extra` returns."""
