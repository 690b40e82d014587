"""The supported architectures: how each one's config.json is read, and the names of its tensors."""
