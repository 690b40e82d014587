"""What stands behind the attention of a layer: an MLP, or a mixture of experts."""
