"""Running a loaded model: compilation, sampling, the engine."""
