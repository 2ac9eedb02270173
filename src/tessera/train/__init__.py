"""Train a model on one device or a mesh: data, recipes, the loop, checkpoints."""
