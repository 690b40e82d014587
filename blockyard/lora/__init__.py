"""Adapters (LoRA and soft prompts): settings and requests that services and users of `LLM` share."""
