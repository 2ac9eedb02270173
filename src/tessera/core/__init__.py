"""Shared basics: shapes, files, hardware, memory, child processes. Imports no other package of Tessera."""
