"""Published data sets as tables with histories, for `gdpa convert`: movielens.py and kuairand.py read their files
with records.py, histories.py puts rows in the order of time and finds the history of each, writing.py writes them."""

from gdpa.data.convert.kuairand import KUAIRAND
from gdpa.data.convert.movielens import MOVIELENS
from gdpa.data.convert.writing import Converter

CONVERTERS: dict[str, Converter] = {**MOVIELENS, **KUAIRAND}
"""By the names that `gdpa convert` takes."""

__all__ = ["CONVERTERS", "Converter"]
