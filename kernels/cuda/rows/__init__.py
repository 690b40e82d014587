"""The ops without a matrix product that look at whole rows or heads: norms, rotation, writing to the cache."""
