"""Calls that repeat: what is decided once for a kind of call, the short way to the backend, compiling ahead."""
