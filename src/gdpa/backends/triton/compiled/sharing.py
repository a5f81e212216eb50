"""One copy of the code of two consumers, which Gluon compiles one by one.

A kernel's consumers run the same function on different halves of a tile, but each has a copy of it in the machine code.
A step of the backward in both copies together is 34 KB for gelu_tanh at D 64, more than the instruction cache keeps:
warps wait for instructions for a fifth of their time (ncu, stall_no_inst), and so it is with params and tables, and in
the forward with tables that are looked up for every pair (config.py says which kernels this is for). If the source asks
``number_of_consumer`` (pipeline.py) which consumer it is, instead of being told at compile time, both copies do the
same. Then ``shared`` lets the first consumer, which is the kernel's default partition, enter the copy of the second
one; its own is left out by the assembler. What tells the two apart is set on the way in, by constants, so that the
assembler knows that it is the same for all threads of a warp:

    %consumer     0 or 1
    %own_barrier  the barrier among a consumer's warps, for which Triton writes 0 and 2
    %scratch      where its scratch memory is, seen from the second consumer's (see scratch.py)

The second consumer's code counts on what all worker partitions compute before they part (loads of arguments), and on
arguments that the kernel hands over in shared memory. The first computes and loads the same, and then goes on where
the second one begins; behind the loop it goes back to where its own code ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from gdpa.backends.triton import compat
from gdpa.backends.triton.compiled import scratch
from gdpa.backends.triton.compiled.scratch import UnlikeError
from gdpa.backends.tuning import triton_version
from gdpa.functions import stored

RELEASES = ("3.6.", "3.7.")
QUICKLY = "-O1"  # for what is assembled only to be taken apart again
FIRST_BARRIER, SECOND_BARRIER = 0, 2  # Triton's, of the default partition and of the first worker


def is_possible() -> bool:
    """Whether kernels may be written for it: with the releases of Triton whose PTX is known here (3.8 writes it in
    another order), and if kernels are compiled through finding.py."""
    known = (triton_version() or "").startswith(RELEASES)
    return known and stored.folder() is not None and not compat.cannot_find() and not compat.cannot_fill()


def is_wanted(constants: Iterable[Any]) -> bool:
    """Whether a kernel with these compile-time arguments has consumers that are alike."""
    return any(getattr(x, "ALIKE", False) is True for x in constants)


def shared(ptx: str) -> str | None:
    """``ptx`` with one copy of the consumers' code; None if it is not as these releases write it."""
    try:
        return _shared(_counted_within(ptx))
    except (UnlikeError, LookupError):
        return None


def _shared(ptx: str) -> str:
    if len(NUMBER.findall(ptx)) < 2:
        raise UnlikeError
    at = _places(ptx)
    ptx, apart = scratch.of_either(ptx, at.first.end(), at.second.end())
    if apart:
        at = _places(ptx)
    insertions = {
        at.first.start(2): at.before + at.second[2],
        at.first.end(3): f"{_told(0, FIRST_BARRIER, -apart)}\tbra.uni \t$L_CONSUMER;\n",
        at.first_over.start(1): "$L_FIRST_OVER:\n",
        at.second.end(3): f"{_told(1, SECOND_BARRIER, 0)}$L_CONSUMER:\n",
        at.second_over.start(1): "\tsetp.eq.b32 \t%is_first, %consumer, 0;\n\t@%is_first bra.uni \t$L_FIRST_OVER;\n",
    }
    for place in sorted(insertions, reverse=True):
        ptx = ptx[:place] + insertions[place] + ptx[place:]
    return _of_either(ptx.replace(at.fork, at.fork.replace(" bra ", " bra.uni "), 1))


class _Places(NamedTuple):
    """Where the consumers' codes begin and end, the branch to one of them and to the workers, and what all workers
    do together before they wait to be told what they are."""

    first: re.Match[str]
    second: re.Match[str]
    first_over: re.Match[str]
    second_over: re.Match[str]
    fork: str
    before: str


def _places(ptx: str) -> _Places:
    fork = _find(r"\t@(%p\d+) bra \t(\$L__BB\w+);\n\tbra\.uni \t(\$L__BB\w+);\n", ptx)
    of_all = _find(rf"{re.escape(fork[2])}:.*\n(?:\tld\.param.*\n|\t\.loc.*\n)*{_registers('inc')}", ptx)[1]
    workers = _find(rf"{re.escape(fork[3])}:.*\n((?:.*\n)*?)\tbra\.uni \t\$L__BB\w+;\n", ptx)
    waiting = _find(rf"{_registers('dec')}{WAIT}((?:\tmov.*\n)*)\tadd\.s32 .*\n\tld\.shared\.b8 ", ptx)
    table = _find(r"\s*\$L_brx_\d+: \.branchtargets\s+(\$L__BB\w+)[,;]", ptx)[1]
    first = _find(rf"{_registers('dec')}(){WAIT}()", ptx)
    second = _find(rf"{re.escape(table)}:.*\n{_registers('inc')}((?:\tld\.shared.*\n|\t\.loc.*\n)*){WAIT}()", ptx)
    first_over = _only(rf"(){WAIT}{_registers('inc', of_all)}", ptx)
    second_over = _only(rf"(){WAIT}{_registers('dec', waiting[1])}\tbra", ptx)
    in_order = first.end() < second.start() < second_over.start() < first_over.start()
    if not in_order or first[1] != second[1]:
        raise UnlikeError
    before = MARK.sub("", workers[1] + waiting[2])  # labels must not be there twice
    only_theirs = _names_in(ptx[workers.start() : second.start()]) - _names_in(ptx[: fork.end()] + before)
    own = second[2] + scratch.code_from(ptx, second.end())
    if IMPURE.search(before) or only_theirs & _names_in(own):
        raise UnlikeError
    if any(_counts_on(own, thread, bits=7) for thread in _threads(ptx)):
        raise UnlikeError
    return _Places(first, second, first_over, second_over, fork[0], before)


WAIT = r"\tbarrier\.sync \t1;\n"  # of all warps: partitions begin, or have ended
# Anything but loads of arguments and arithmetic.
PURE = r"(?:ld\.param|mov|cvta?|add|sub|mul|mad|sh[lr]|and|or|xor|min|max|setp|selp)\b"
IMPURE = re.compile(rf"^(?!\t(?:{PURE}|\.loc|//)|$)", re.MULTILINE)
MARK = re.compile(r"^\$L__tmp\d+:.*\n", re.MULTILINE)  # a label for debuggers


def _registers(change: str, number: str = r"(\d+)") -> str:
    return rf"\tsetmaxnreg\.{change}\.sync\.aligned\.u32 \t{number};\n"


def _names_in(ptx: str) -> set[str]:
    return set(re.findall(r"%[a-z]+\d+", ptx))


def _find(pattern: str, ptx: str) -> re.Match[str]:
    found = re.search("^" + pattern, ptx, re.MULTILINE)
    if found is None:
        raise UnlikeError
    return found


def _only(pattern: str, ptx: str) -> re.Match[str]:
    """The same, of what must not be there twice."""
    found = list(re.finditer("^" + pattern, ptx, re.MULTILINE))
    if len(found) != 1:
        raise UnlikeError
    return found[0]


def _told(consumer: int, barrier: int, scratch_at: int) -> str:
    told = {"%consumer": consumer, "%own_barrier": barrier, "%scratch": scratch_at}
    return "".join(f"\tmov.b32 \t{name}, {value};\n" for name, value in told.items())


def _counted_within(ptx: str) -> str:
    """``ptx`` in which the second consumer counts its threads from 0 on, as both can. (What it has in common with the
    first one is left out anyway.)"""
    threads = "|".join(_threads(ptx)) or "none"
    return re.sub(rf"add\.s32 \t(%r\d+), ({threads}), -128;", r"and.b32 \t\1, \2, 127;", ptx)


def _counts_on(code: str, register: str, bits: int) -> bool:
    """Whether ``code`` takes more of a number in ``register`` than its lowest ``bits``: of a thread's number, more than
    which one of its consumer's threads it is."""
    for line in re.findall(rf"^\t.*{register}\b.*$", code, re.MULTILINE):
        if re.fullmatch(rf"\t\S+ \t{register}, (?!.*{register}\b).*", line):
            continue  # it is defined here
        use = re.fullmatch(rf"\t(and|shl|shr|bfe)\.[bu]32 \t(%r\d+), {register}, (\d+)(?:, (\d+))?;", line)
        if use is None:
            return True
        kind, number = use[1], int(use[3])
        if kind == "and":
            more = number >> bits > 0
        elif kind == "bfe":  # so many bits from there on
            more = number + int(use[4]) > bits
        else:
            more = _counts_on(code, use[2], max(bits + number if kind == "shl" else bits - number, 0))
        if more:
            return True
    return False


def _threads(ptx: str) -> list[str]:
    """The registers that have a thread's number."""
    return re.findall(r"mov\.u32 \t(%r\d+), %tid\.x;", ptx)


def _of_either(ptx: str) -> str:
    """The second consumer's code for both."""
    ptx = ptx.replace(f"bar.sync \t{SECOND_BARRIER}, 128;", "bar.sync \t%own_barrier, 128;")
    ptx = NUMBER.sub(r"mov.b32 \1, %consumer;", ptx).replace("brx.idx ", "brx.idx.uni ")
    declared = "\t.reg .b32 \t%consumer, %own_barrier, %scratch, %scratch_at;\n\t.reg .pred \t%is_first;\n"
    return ptx.replace("\t.reg .pred", f"{declared}\t.reg .pred", 1)


# Which of two consumers a warp belongs to, where nobody says %consumer: they are the kernel's first warps.
OWN_NUMBER = (
    "{ .reg .u32 own; .reg .pred second; mov.u32 own, %tid.x; setp.ge.u32 second, own, 128; "
    "vote.sync.ballot.b32 own, second, -1; and.b32 $0, own, 1; }"
)
NUMBER = re.compile(re.escape(OWN_NUMBER).replace(r"\$0", r"(%r\d+)"))
