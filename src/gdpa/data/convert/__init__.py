"""Published data sets as tables with histories, for `gdpa convert`: movielens.py and kuairand.py read their files
with records.py, writing.py puts rows in the order of time, gives them histories and writes them."""

from gdpa.data.convert.kuairand import KUAIRAND
from gdpa.data.convert.movielens import MOVIELENS
from gdpa.data.convert.writing import Converter

CONVERTERS: dict[str, Converter] = {**MOVIELENS, **KUAIRAND}
"""By the names that `gdpa convert` takes."""

__all__ = ["CONVERTERS", "Converter"]
