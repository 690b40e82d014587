"""The OpenAI Responses API of the gateway, without its parts that need stored responses."""
