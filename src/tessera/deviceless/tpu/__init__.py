"""Compile for TPU and predict times on a machine without one."""
