"""The formats in which families of models write reasoning and tool calls, and one scanner for all of them."""
