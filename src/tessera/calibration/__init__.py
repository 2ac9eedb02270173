"""Make a plan for a model: measure its attention, search for budgets, find the length from which Kascade is faster."""
