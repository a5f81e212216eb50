"""Tables as streams of samples: log.py is the stream, counting.py counts values for vocabularies, dividing.py splits,
workers.py decodes in other processes and threads. unlabelled.py is for predictions."""

from gdpa.data.tables.log import TableLog, schema_of, split
from gdpa.data.tables.unlabelled import Unlabelled, unlabelled

__all__ = ["TableLog", "Unlabelled", "schema_of", "split", "unlabelled"]
