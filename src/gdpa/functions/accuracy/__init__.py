"""Which approximations inside a function cannot be seen in its results."""
