"""The OpenAI HTTP API, a second front on the gateway's core."""
