"""The ops without a matrix product that read whole rows or heads: norms, rotary embedding, writing to the KV cache."""
