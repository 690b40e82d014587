"""Runs the services on one machine: `LLM`, and the processes behind `LLM` and `blockyard serve`."""
