"""Grammars that constrain answers: built from a request as text for the workers, and checked before it is queued."""
