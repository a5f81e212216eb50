"""Where rows come from: base.py has the protocol, text.py reads CSV and TSV, arrow.py Parquet, Arrow and frames,
opening.py finds out what a source is, from a file name, a list or an object."""

from gdpa.data.sources.base import Block, Source
from gdpa.data.sources.opening import open_source

__all__ = ["Block", "Source", "open_source"]
