"""Compile for Hopper and check the machine code on a machine without a Hopper GPU."""
