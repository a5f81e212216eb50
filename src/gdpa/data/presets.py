"""Schemas of public data sets in the layout of https://github.com/reczoo/Datasets.

Names, lengths and minimum counts are those of the BARS benchmark (https://github.com/reczoo/BARS, ranking/ctr/DIN), so
that results can be compared with its leaderboard. Like there, the test file also serves for validation: none of the
three comes with a file for it.
"""

from __future__ import annotations

from gdpa.data.schema import Categorical, History, Numeric, Schema

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

PRESETS: dict[str, Schema] = {
    "AmazonElectronics_x1": AMAZON_ELECTRONICS_X1,
    "TaobaoAd_x1": TAOBAO_AD_X1,
    "KuaiVideo_x1": KUAI_VIDEO_X1,
}
"""The columns of public data sets, by name: ``ReczooCSV(path, "TaobaoAd_x1")``."""
