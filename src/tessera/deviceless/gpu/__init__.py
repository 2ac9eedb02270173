"""Compile for Hopper and check its machine code on a machine without one."""
