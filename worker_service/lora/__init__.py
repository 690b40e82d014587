"""LoRA adapters: their limits, their files, the host's cache and the device's slots."""
