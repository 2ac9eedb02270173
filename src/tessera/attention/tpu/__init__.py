"""Pallas kernels for TPU."""
