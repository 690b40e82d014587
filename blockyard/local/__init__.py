"""The services on one machine: `LLM`, and the processes behind it and behind `blockyard serve`."""
