"""Judge a plan on a real model: closeness to dense attention, answers to questions, rivals."""
