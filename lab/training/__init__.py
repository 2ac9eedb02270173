"""The training data and the recipe of the demo model."""
