"""From logits to tokens: edits, penalties, filters, draws and log probabilities."""
