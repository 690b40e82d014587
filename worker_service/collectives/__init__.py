"""The collective operations of a group's ranks: one implementation for each transport."""
