"""`tessera serve`: an OpenAI-compatible HTTP server for one engine or several replicas."""
