"""What operators see of a worker: metrics, spans and profiles."""
