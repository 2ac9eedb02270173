"""Comparisons with other libraries, and their workers, which run in environments without Tessera."""
