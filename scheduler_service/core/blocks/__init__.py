"""KV blocks: the pools, the holders of each block, and the copies on the host."""
