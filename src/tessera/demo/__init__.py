"""The demo: a small trained model answers questions about a real document, dense and with Kascade."""
