"""What becomes of weights and pools after they were set up: asleep, awake, loaded anew."""
