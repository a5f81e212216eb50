"""Click logs as jagged batches: a synthetic one with planted structure, and public ones from CSV files.

batch.py is what a model gets, stream.py what all sources have in common. synthetic.py generates, planted.py has the
formula of its labels, draws.py its random numbers, lengths.py the lengths of histories. reczoo.py reads files:
schema.py says what their columns are, presets.py for three public data sets, rows.py splits lines, vocabulary.py
numbers values, parse.py makes samples.
"""

from gdpa.data.batch import Batch, Events, Inputs, PackedEvents, Sample, batches, collate
from gdpa.data.errors import DataError
from gdpa.data.parse import Tally
from gdpa.data.planted import Parts, Weights, expected_auc
from gdpa.data.presets import PRESETS
from gdpa.data.reczoo import ReczooCSV
from gdpa.data.schema import Categorical, History, Numeric, Schema
from gdpa.data.stream import Stream
from gdpa.data.synthetic import LENGTHS, SyntheticLog
from gdpa.data.vocabulary import MISSING, UNSEEN, Vocabularies

__all__ = [
    "LENGTHS",
    "MISSING",
    "PRESETS",
    "UNSEEN",
    "Batch",
    "Categorical",
    "DataError",
    "Events",
    "History",
    "Inputs",
    "Numeric",
    "PackedEvents",
    "Parts",
    "ReczooCSV",
    "Sample",
    "Schema",
    "Stream",
    "SyntheticLog",
    "Tally",
    "Vocabularies",
    "Weights",
    "batches",
    "collate",
    "expected_auc",
]
