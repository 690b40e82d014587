"""The part of a layer after its attention: an MLP, or a mixture of experts."""
