"""Portable kernels, written in jax.numpy, which run on every platform of XLA."""
