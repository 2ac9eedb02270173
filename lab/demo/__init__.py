"""The demo: a small model answers questions about a real document, with dense attention and with Kascade."""
