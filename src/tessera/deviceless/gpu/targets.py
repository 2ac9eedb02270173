"""Target configurations of GPUs that this machine lacks, one text file each."""

from pathlib import Path
from types import MappingProxyType

TARGETS = MappingProxyType({"h200": Path(__file__).with_name("h200.txtpb")})
"""Short name of a chip -> its configuration file."""
