"""Turns text into token ids and back: tokenizer, chat template, detokenizer, stop strings."""
