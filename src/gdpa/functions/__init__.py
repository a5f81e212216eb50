"""The function compiler: a plain torch function in, eager code and Triton source with derivatives out."""
