"""What operators ask of the scheduler: its status, its state, drains and profiles."""
