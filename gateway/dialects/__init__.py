"""How families of models write reasoning and calls of tools, and one scanner that tells these apart from text."""
