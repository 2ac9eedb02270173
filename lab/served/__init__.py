"""Measure the real server: it runs as a child process, and a client drives it over HTTP."""
