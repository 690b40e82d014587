"""LoRA adapters on a GPU: their slots, the rows that have them, and the products of both factors."""
