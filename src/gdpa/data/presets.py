"""Schemas of public data sets: three in the layout of https://github.com/reczoo/Datasets, and those of `gdpa convert`.

Of the former, names, lengths and minimum counts are those of the BARS benchmark (https://github.com/reczoo/BARS,
ranking/ctr/DIN), so that results can be compared with its leaderboard. Like there, the test file also serves for
validation: none of the three comes with a file for it.
"""

from __future__ import annotations

from gdpa.data.schema import Bag, Categorical, History, Numeric, Schema, Time

# label,user_id,item_id,cate_id,item_history,cate_history. The user is no feature: each has one test pair.
AMAZON_ELECTRONICS_X1 = Schema(
    label="label",
    group="user_id",
    categorical=(Categorical("item_id"), Categorical("cate_id")),
    histories=(
        History("history", (Categorical("item_history", "item_id"), Categorical("cate_history", "cate_id")), 100),
    ),
    min_count=1,
)

# clk,btag_his,cate_his,brand_his,userid,...,price,pid,btag. The file was made by dropping the zeros of each history
# column on its own, so a row's columns can differ in length: they are aligned at the newest event.
TAOBAO_AD_X1 = Schema(
    label="clk",
    group="userid",
    numeric=(Numeric("price", log1p=True),),  # to 10^8
    categorical=tuple(
        Categorical(name)
        for name in (
            "userid", "cms_segid", "cms_group_id", "final_gender_code", "age_level", "pvalue_level", "shopping_level",
            "occupation", "new_user_class_level", "adgroup_id", "cate_id", "campaign_id", "customer", "brand", "pid",
            "btag",
        )
    ),
    histories=(
        History(
            "history",
            (Categorical("cate_his", "cate_id"), Categorical("brand_his", "brand"), Categorical("btag_his", "btag")),
            50,
            unequal="fill",
        ),
    ),
    min_count=10,
)  # fmt: skip

# timestamp,user_id,item_id,is_click,is_like,is_follow,pos_items,neg_items: clicked videos and ignored ones are two
# histories of their own lengths, of which the file has each user's first 100. is_like and is_follow happen after the
# click, and would give it away.
KUAI_VIDEO_X1 = Schema(
    label="is_click",
    group="user_id",
    categorical=(Categorical("user_id"), Categorical("item_id")),
    histories=(
        History("pos_items", (Categorical("pos_items", "item_id"),), 100),
        History("neg_items", (Categorical("neg_items", "item_id"),), 100),
    ),
    min_count=10,
)

# What `gdpa convert movielens-...` writes. liked: at least 4 stars. A rating's history are the user's earlier ones.
_MOVIELENS_HISTORY = History(
    "history", (Categorical("hist_items", "item_id"), Numeric("hist_ratings"), Time("hist_times")), 50
)
MOVIELENS_20M = Schema(
    label="liked",
    group="user_id",
    categorical=(Categorical("user_id"), Categorical("item_id")),
    histories=(_MOVIELENS_HISTORY,),
    bags=(Bag("genres"),),
    time="time",
)
MOVIELENS = Schema(
    label="liked",
    group="user_id",
    categorical=tuple(Categorical(name) for name in ("user_id", "item_id", "age", "gender", "occupation", "zip")),
    histories=(_MOVIELENS_HISTORY,),
    bags=(Bag("genres"),),
    time="time",
)

# What `gdpa convert kuairand-...` writes: three labels, and the videos that the user clicked before.
KUAIRAND = Schema(
    label=("is_click", "long_view", "is_like"),
    group="user_id",
    categorical=tuple(
        Categorical(name)
        for name in (
            "user_id", "video_id", "tab", "user_active_degree", "is_video_author", "follow_user_num_range",
            "register_days_range", "author_id", "video_type", "upload_type", "music_id",
        )
    ),
    histories=(
        History(
            "clicked",
            (
                Categorical("hist_videos", "video_id"), Categorical("hist_authors", "author_id"),
                Categorical("hist_tabs", "tab"), Time("hist_times", "ms"),
            ),
            50,
        ),
    ),
    bags=(Bag("tags"),),
    time="time",
    time_unit="ms",
)  # fmt: skip

PRESETS: dict[str, Schema] = {
    "AmazonElectronics_x1": AMAZON_ELECTRONICS_X1,
    "TaobaoAd_x1": TAOBAO_AD_X1,
    "KuaiVideo_x1": KUAI_VIDEO_X1,
    "MovieLens_100k": MOVIELENS,
    "MovieLens_1M": MOVIELENS,
    "MovieLens_20M": MOVIELENS_20M,
    "KuaiRand": KUAIRAND,
}
"""The columns of public data sets, by name: ``ReczooCSV(path, "TaobaoAd_x1")``."""
