"""Tasks: what a run prepares, what its loss is, what a preview of it is; one for a kind of model.

A task works with any family of its kind: `latent` with models that generate from noise.
"""
