"""Where the files of each preset come from, for the message about one that is missing. Imports no torch."""

from __future__ import annotations

RECZOO = "https://github.com/reczoo/Datasets has it"
ORIGINS = {
    "AmazonElectronics_x1": RECZOO,
    "TaobaoAd_x1": RECZOO,
    "KuaiVideo_x1": RECZOO,
    "MovieLens_100k": "gdpa convert movielens-100k makes it of https://files.grouplens.org/datasets/movielens/ml-100k.zip",
    "MovieLens_1M": "gdpa convert movielens-1m makes it of https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    "MovieLens_20M": "gdpa convert movielens-20m makes it of https://files.grouplens.org/datasets/movielens/ml-20m.zip",
    "KuaiRand": "gdpa convert kuairand-pure (or -1k, -27k) makes it of the files of https://kuairand.com",
}
"""By the names of gdpa.data.PRESETS."""
