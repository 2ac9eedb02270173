"""Portable kernels, written in jax.numpy, that run on every platform that XLA supports."""
