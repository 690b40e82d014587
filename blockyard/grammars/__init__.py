"""Limits of grammars, which gateways and workers must share."""
