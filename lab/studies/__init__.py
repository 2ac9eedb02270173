"""Long, resumable measurements, each with its own records."""
