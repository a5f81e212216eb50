"""Repeated calls: what is decided once for each kind of call, the short way to the backend, and compiling ahead."""
