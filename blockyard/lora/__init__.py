"""Adapters, of low rank (LoRA) and soft prompts: what the services and users of `LLM` know of them."""
