"""What is done to graphs: simplified, written through other operations, folded, bounded."""
