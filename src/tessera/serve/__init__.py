"""`tessera serve`: an OpenAI-compatible HTTP server over one engine."""
