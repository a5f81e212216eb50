"""Operators on rows, beside attention: what a compiler would write as several passes over memory, in one."""
