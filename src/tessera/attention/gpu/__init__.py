"""Pallas Mosaic kernels for Hopper, and cuDNN's."""
