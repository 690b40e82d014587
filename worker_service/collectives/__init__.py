"""What the ranks of a group do together: one implementation for each transport."""
