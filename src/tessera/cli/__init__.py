"""The `tessera` command."""
