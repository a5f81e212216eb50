"""What a run tells: its journal, scalars, progress and report."""
