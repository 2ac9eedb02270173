"""Configurations of GPUs that are not there, one text file each."""

from pathlib import Path
from types import MappingProxyType

TARGETS = MappingProxyType({"h200": Path(__file__).with_name("h200.txtpb")})
"""By the chip's short name."""
