"""vLLM's HTTP calls for operators, on a port of their own."""
