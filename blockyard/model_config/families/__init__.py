"""The architectures by name: how each one's config.json is read, and where its tensors stand."""
