"""Sums over lanes of a warp, as PTX: what they have for one entry is added up before it goes there.

As the tensor cores leave a tile of keys x queries, a lane has two neighbouring queries of each of 8 blocks of 8, and

    lane            0     1     2     3     4     5    ...                 31
    row (key)       0     0     0     0     1     1    lane / 4            7        and the same of the row 8 below
    columns         0, 1  2, 3  4, 5  6, 7  0, 1  2, 3 2 (lane % 4) + q    6, 7

**Rows.** The four lanes of a row exchange the sums of their two keys, and two of them add up each.

**Columns.** The eight lanes that have the same columns add up what they have by halves: in the first step a lane gives
its sums of four blocks to the lane whose number differs in bit 4, and gets that lane's sums of the other four; then it
is two of these, then one. So 14 exchanges take the place of 48 additions of all to all, and in the end a lane has the
sums of the block whose number is its row (``scattered_sums``).

**Diagonals.** Rows are turned first, row r by r columns to the left, so that diagonals become columns; what leaves a
block on the left comes in at the right of the block before it (``turned``, ``moved``). At the ends that leaves half a
block, of which every lane adds what it has itself.
"""

from __future__ import annotations

from collections.abc import Sequence

OF_ROW, OF_COLUMN = (4, 3, 2), (1, 0)  # bits of a lane's number, from the highest on
ALL = "31, 0xffffffff"


def begin() -> list[str]:
    """The predicates up4 to up0: whether these bits of a lane's number are set."""
    bits = (*OF_ROW, *OF_COLUMN)
    lines = [".reg .b32 lane, bit;", f".reg .pred {', '.join(f'up{b}' for b in bits)};", "mov.u32 lane, %laneid;"]
    for b in bits:
        lines += [f"and.b32 bit, lane, {1 << b};", f"setp.ne.s32 up{b}, bit, 0;"]
    return lines


def added_up(total: str, bits: Sequence[int]) -> list[str]:
    """The sum over lanes that differ in ``bits``, in all of them."""
    lines = ["{", ".reg .f32 given;"]
    for b in bits:
        lines += [f"shfl.sync.bfly.b32 given, {total}, {1 << b}, {ALL};", f"add.rn.f32 {total}, {total}, given;"]
    return [*lines, "}"]


def only_one(entry: str, bits: Sequence[int]) -> list[str]:
    """Of lanes that differ in ``bits`` the first keeps its entry; the others have none, -1."""
    return [f"selp.b32 {entry}, -1, {entry}, up{b};" for b in bits]


# ---- columns ---------------------------------------------------------------------------------------------------------
def scattered_sums(sums: Sequence[str], bits: Sequence[int] = OF_ROW) -> list[str]:
    """``sums``: registers of the blocks one after the other, two of each. The first two get those of a lane's block,
    over eight lanes. (With fewer bits it is fewer lanes and blocks.)"""
    half, lines = len(sums) // 2, ["{", ".reg .f32 given;"]
    for b in bits:
        for low, high in zip(sums[:half], sums[half : 2 * half], strict=True):
            lines += [
                f"selp.f32 given, {low}, {high}, up{b};", f"selp.f32 {low}, {high}, {low}, up{b};",
                f"shfl.sync.bfly.b32 given, given, {1 << b}, {ALL};", f"add.rn.f32 {low}, {low}, given;",
            ]  # fmt: skip
        half //= 2
    return [*lines, "}"]


def scattered(values: Sequence[str], name: str, bits: Sequence[int] = OF_ROW) -> list[str]:
    """Of what all rows have for themselves, that of a lane's block: registers ``name``0 and ``name``1."""
    half = len(values) // 2
    now, lines = list(values), [f".reg .b32 {', '.join(f'{name}{n}' for n in range(half))};"]
    for b in bits:
        lines += [f"selp.b32 {name}{n}, {now[half + n]}, {now[n]}, up{b};" for n in range(half)]
        now, half = [f"{name}{n}" for n in range(half)], half // 2
    return lines


# ---- diagonals -------------------------------------------------------------------------------------------------------
def begin_turning() -> list[str]:
    """From which lanes a lane's two columns come; and whether they come from the block behind its own."""
    return [
        ".reg .b32 row, column, from0, from1;", ".reg .pred behind0, behind1;",
        "shr.u32 row, lane, 2;", "and.b32 column, lane, 3;",
        "shr.u32 from0, row, 1;", "add.s32 from0, from0, column;",
        "and.b32 bit, row, 1;", "add.s32 from1, from0, bit;",
        "and.b32 bit, lane, 28;", "and.b32 from0, from0, 3;", "and.b32 from1, from1, 3;",
        "or.b32 from0, from0, bit;", "or.b32 from1, from1, bit;",
        "mad.lo.s32 column, column, 2, row;", "setp.ge.s32 behind0, column, 8;", "setp.ge.s32 behind1, column, 7;",
    ]  # fmt: skip


def turned(pair: Sequence[str]) -> list[str]:
    """A lane's two columns of a block of 8 as they are after its row was turned, in the same registers. In odd rows
    those change places."""
    first, second = pair
    return [
        "{", ".reg .b32 give0, give1;",
        f"selp.b32 give0, {second}, {first}, up2;", f"selp.b32 give1, {first}, {second}, up2;",
        f"shfl.sync.idx.b32 {first}, give0, from0, {ALL};", f"shfl.sync.idx.b32 {second}, give1, from1, {ALL};", "}",
    ]  # fmt: skip


def moved(to: str, behind: str, here: str, q: int) -> str:
    """What column q of a block gets of two blocks whose rows were turned."""
    return f"selp.b32 {to}, {behind}, {here}, behind{q};"
