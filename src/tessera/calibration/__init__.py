"""Make a plan for a model: measure its attention, search, and time from which length Kascade beats dense."""
