"""What one step computes, and what its answer changes."""
