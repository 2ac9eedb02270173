"""Compile for TPUs and predict times on a machine without a TPU."""
