"""The operators' side of the scheduler: its status, its state, drains and profiles."""
