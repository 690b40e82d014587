"""KV blocks: the pools, who holds which block, and what the host keeps."""
