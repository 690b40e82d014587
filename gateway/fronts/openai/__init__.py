"""The OpenAI HTTP API of the gateway."""
