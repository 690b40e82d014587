"""Mixtures of experts: what every backend shares."""
