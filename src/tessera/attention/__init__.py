"""Attention kernels behind one contract."""
