"""Running a loaded model: compilation, sampling and the engine."""
