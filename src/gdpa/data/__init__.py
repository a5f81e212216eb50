"""Click logs as jagged batches: a synthetic one with planted structure, and tables of your own.

batch.py has what a model gets, stream.py what all streams of samples have in common. synthetic.py generates, planted.py
has the formula of its labels, draws.py its random numbers, lengths.py the lengths of histories. tables/ reads tables:
schema.py says what their columns are, presets.py for public data sets, sources/ where rows come from, decoding/ how
they become arrays, vocabulary.py numbers values. reczoo.py is the table of one CSV file, samples.py any iterable of
samples. convert/ turns published files into tables.
"""

from gdpa.data.batch import Batch, Events, Inputs, PackedEvents, Sample, batches, collate
from gdpa.data.decoding import Tally
from gdpa.data.errors import DataError
from gdpa.data.planted import Parts, Weights, expected_auc
from gdpa.data.presets import PRESETS
from gdpa.data.reczoo import ReczooCSV
from gdpa.data.samples import SampleLog
from gdpa.data.schema import Bag, Categorical, History, Numeric, Schema, Time
from gdpa.data.sources import Block, Source
from gdpa.data.stream import Stream
from gdpa.data.synthetic import LENGTHS, SyntheticLog
from gdpa.data.tables import TableLog, Unlabelled, split, unlabelled
from gdpa.data.vocabulary import MISSING, UNSEEN, Vocabularies

__all__ = [
    "LENGTHS",
    "MISSING",
    "PRESETS",
    "UNSEEN",
    "Bag",
    "Batch",
    "Block",
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
    "SampleLog",
    "Schema",
    "Source",
    "Stream",
    "SyntheticLog",
    "TableLog",
    "Tally",
    "Time",
    "Unlabelled",
    "Vocabularies",
    "Weights",
    "batches",
    "collate",
    "expected_auc",
    "split",
    "unlabelled",
]
