"""LoRA adapters: their limits, files, the cache of the host and the slots of the device."""
