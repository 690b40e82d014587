"""The Anthropic Messages API of the gateway."""
