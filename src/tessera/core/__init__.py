"""Shared basics: shapes, files, hardware, memory, child processes. This package imports no other Tessera package."""
