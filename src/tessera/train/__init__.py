"""Training of the demo model: data, recipes, the loop."""
