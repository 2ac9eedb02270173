"""Portable kernels, written in jax.numpy: they run wherever XLA does."""
