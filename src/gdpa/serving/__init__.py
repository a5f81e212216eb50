"""Trained models outside of training: exported, compiled ahead of time, and scoring files.

export.py makes programs, scoring.py reads a file and scores it, writing.py writes CSV or Parquet, checkpoints.py finds
what a run has left.
"""

from gdpa.serving.export import dynamic_shapes, export, package

__all__ = ["dynamic_shapes", "export", "package"]
