"""How a tile walks over the blocks of the other side: the loops of every kernel of this backend that computes
scores."""

import triton
import triton.language as tl

from gdpa.device.places import CHUNK, block_sets, first_of


@triton.jit
def walk(
    state, edges, fixed, len_q, len_k, spot, args, VISIT: tl.constexpr, CODE: tl.constexpr, BY_KEY: tl.constexpr,
    LEFT_EDGE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The ``state`` after VISIT(state, row, args, CODE, MASKED, T) of every block that the tile from ``fixed`` on sees.

    ``row`` is the block's first row; BY_KEY: blocks are of keys, and the tile of queries; otherwise the other way
    round. ``edges``: see sequences.visible_blocks. Without a mask there are three ranges of blocks: those that the left
    edge of a band cuts (LEFT_EDGE: there may be any), those without hidden pairs, and those that the right edge or the
    end cuts. With a mask, CODE.CLASSIFY finds the blocks in sets of CHUNK.
    """
    lo, full_lo, full_hi, hi = edges
    BLOCK: tl.constexpr = T.BLOCK_N if BY_KEY else T.BLOCK_M
    if CODE.CLASSIFY is not None:
        for c0 in tl.range(lo, hi, CHUNK * BLOCK):
            counts, blocks = block_sets(
                spot, c0, fixed, len_q, len_k, full_lo, full_hi, hi, CODE.CLASSIFY, BY_KEY, T.BLOCK_M, T.BLOCK_N
            )
            for kind in tl.static_range(2):  # blocks whose pairs are all visible, then those that are cut
                rest = blocks[kind]
                for _ in tl.range(0, counts[kind]):
                    row = c0 + first_of(rest) * BLOCK
                    rest = rest & (rest - 1)
                    state = VISIT(state, row, args, CODE, kind == 1, T)
    else:
        for part in tl.static_range(3):
            if part > 0 or LEFT_EDGE:
                for row in tl.range(edges[part], edges[part + 1], BLOCK):
                    state = VISIT(state, row, args, CODE, part != 1, T)
    return state
