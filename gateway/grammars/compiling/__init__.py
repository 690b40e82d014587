"""Processes that compile grammars, so that an expensive one delays no other request."""
