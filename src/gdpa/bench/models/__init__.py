"""`gdpa bench --model`: steps of whole models."""
