"""Adapters of low rank (LoRA): what the services and users of `LLM` know of them."""
