"""Long resumable measurements, each with records of its own."""
