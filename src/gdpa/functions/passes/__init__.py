"""Passes over graphs: simplify them, express operations through others, fold constants, bound values."""
