"""The demo: a small model that is really trained answers questions about a real document, dense and with Kascade."""
