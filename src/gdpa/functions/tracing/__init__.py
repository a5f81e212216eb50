"""From a torch function to a graph of scalar operations."""
