"""Processes that compile grammars, so that what one costs holds nobody else."""
