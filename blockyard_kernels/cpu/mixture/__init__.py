"""Mixtures of experts in C++: see csrc/experts.h."""
