"""The backward kernel and its parts."""
