"""What runs a loaded model: compilation, sampling, the engine."""
