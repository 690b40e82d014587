"""The OpenAI Responses API of the gateway, as far as it needs no memory."""
