"""Running requests, and the connection to the scheduler that runs them."""
