"""Discrete-event simulation of serving: the real scheduler, page pool and prefix cache, with predicted step times."""
