"""Attention kernels for TPU, written in Pallas."""
