"""Tables as streams of samples: log.py is the stream, counting.py counts values for vocabularies, dividing.py splits,
workers.py decodes in other processes and threads."""

from gdpa.data.tables.log import TableLog, schema_of, split

__all__ = ["TableLog", "schema_of", "split"]
