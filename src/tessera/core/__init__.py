"""What every room uses: shapes, files, hardware, memory, child processes. Imports nothing of Tessera's."""
