"""Interactions of feature tokens."""
