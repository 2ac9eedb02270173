"""Make a plan for a model: measure its attention, search, and time where Kascade starts to pay."""
