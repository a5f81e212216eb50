"""The data of a run: its splits, and batches dealt to ranks."""
