"""From columns of a table to arrays: decoded.py is the result, rules.py what a schema asks for, whatever the columns
are made of; text.py has columns of CSV and TSV files, arrow.py those of Parquet, Arrow and frames, which forms.py
makes plain."""

from gdpa.data.decoding.decoded import Decoded, Lists, Tally
from gdpa.data.decoding.rules import Decoder

__all__ = ["Decoded", "Decoder", "Lists", "Tally"]
