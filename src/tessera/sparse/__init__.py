"""Sparse attention policies, which decide what keys each query reads, and plans for them."""
