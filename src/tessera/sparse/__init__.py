"""Sparse attention: policies, which decide what keys each query reads, and plans, which configure a policy."""
