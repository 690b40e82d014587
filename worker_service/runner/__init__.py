"""The network at work on forward batches."""
