"""Make a plan for a model: measure its attention, search for budgets, and find the length from which Kascade is faster
than dense."""
