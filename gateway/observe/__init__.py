"""What operators see of the gateway: its metrics, its log of requests, and their spans."""
