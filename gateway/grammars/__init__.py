"""Grammars of answers: what a request asks for as a text that workers read, checked before it is queued."""
