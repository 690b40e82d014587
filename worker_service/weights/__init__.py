"""Changes of weights and pools after set-up: sleep, wake-up, reload, update and saving."""
