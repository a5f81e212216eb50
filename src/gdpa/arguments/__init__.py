"""The arguments of calls: refused by name and value, or brought to one form."""
