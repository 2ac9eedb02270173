"""Sparse attention policies: who attends to what."""
