"""The part of a layer behind its attention: an MLP, or a mixture of experts."""
