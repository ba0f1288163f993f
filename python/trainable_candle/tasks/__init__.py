"""Tasks, one for each kind of model: how a run prepares data, computes the loss, draws previews.

A task works with any family of its kind: `latent` with models that generate images from noise,
`text` with language models.
"""
