"""Make a plan for a model: measure attention, search for budgets, find the length at which Kascade gets faster than
dense."""
