"""The adapters of low rank in the host caches of a replica's workers."""
