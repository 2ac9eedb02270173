"""Attention kernels for NVIDIA GPUs: our own for Hopper, written in Pallas (Mosaic GPU), and cuDNN's."""
