"""Training of a model on one device or a mesh: data, recipes, the loop and checkpoints."""
