"""Columns of pyarrow in the few forms that arrow.py knows: in one piece, text as strings, lists as lists."""

from __future__ import annotations

from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

BYTES = ("binary", "large_binary", "fixed_size_binary")
VIEWS = ("string_view", "binary_view")
LISTS = ("list", "large_list")
OTHER_LISTS = ("list_view", "large_list_view", "fixed_size_list")


def is_a(kind: pa.DataType, *names: str) -> bool:
    """By the names of pyarrow.types; versions of pyarrow that do not know a type have no such columns."""
    return any(getattr(types, f"is_{name}", lambda _: False)(kind) for name in names)


def plain(column: pa.ChunkedArray) -> tuple[pa.Array, list[int]]:
    """The column, and the rows of it, null now, whose bytes are not UTF-8."""
    found = _simple(column)
    is_list = is_a(found.type, *LISTS)
    if not is_a(found.type.value_type if is_list else found.type, *BYTES):
        return found, []
    return _as_text(found, pa.large_list(pa.large_string()) if is_list else pa.large_string())


def has_coded_lists(kind: pa.DataType) -> bool:
    """Whether the entries of its lists are in a dictionary, as those of polars' List(Categorical)."""
    return is_a(kind, *LISTS, *OTHER_LISTS) and is_a(kind.value_type, "dictionary")


def takeable(table: pa.Table) -> pa.Table:
    """Without views of text and bytes, of which pyarrow 26 cannot take rows."""
    for i, field in enumerate(table.schema):
        if is_a(_value_type(field.type), *VIEWS):
            table = table.set_column(i, field.name, _simple(table.column(i)))
    return table


def _simple(column: pa.ChunkedArray) -> pa.Array:
    """In one piece: neither a dictionary, nor a view, nor a list of either."""
    if is_a(_value_type(column.type), "dictionary") and column.num_chunks > 1:  # 8 bits may not count all their values
        column = pa.chunked_array([_plain(chunk) for chunk in column.chunks])
    found = column.combine_chunks()
    if isinstance(found, pa.ChunkedArray):  # no chunk, or more than 2 GB of text
        found = pa.concat_arrays(found.chunks) if found.num_chunks else pa.array([], column.type)
    return _plain(found)


def _plain(found: pa.Array) -> pa.Array:
    found = _decoded(found)
    own = _value_type(found.type)
    if is_a(found.type, *OTHER_LISTS) or is_a(own, "dictionary", *VIEWS) or isinstance(own, pa.BaseExtensionType):
        found = _as_lists(found)
    return found


def _value_type(kind: pa.DataType) -> pa.DataType:
    """Of a list's entries; other types are their own."""
    return kind.value_type if is_a(kind, *LISTS, *OTHER_LISTS) else kind


def _decoded(found: pa.Array) -> pa.Array:
    """The values of a dictionary, what a view shows, and what an extension is made of."""
    if isinstance(found.type, pa.BaseExtensionType):
        return _uuid_texts(found.storage) if found.type.extension_name == "arrow.uuid" else _plain(found.storage)
    if types.is_dictionary(found.type):  # whose own values may be views, of which nothing can be taken
        return pa.DictionaryArray.from_arrays(found.indices, _decoded(found.dictionary)).dictionary_decode()
    if is_a(found.type, *VIEWS):
        return found.cast(pa.large_string() if is_a(found.type, "string_view") else pa.large_binary())
    return found


def _uuid_texts(found: pa.Array) -> pa.Array:
    """As CSV files have them; each different one is written once."""
    coded = found.dictionary_encode()
    texts = pa.array([str(UUID(bytes=value)) for value in coded.dictionary.to_pylist()], pa.string())
    return pa.DictionaryArray.from_arrays(coded.indices, texts).dictionary_decode()


def _as_lists(found: pa.Array) -> pa.Array:
    """Not by a cast, which loses entries of list views (pyarrow 26)."""
    lengths = pc.fill_null(pc.list_value_length(found), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return pa.LargeListArray.from_arrays(pa.array(offsets), _decoded(found.flatten()))


def _as_text(found: pa.Array, text: pa.DataType) -> tuple[pa.Array, list[int]]:
    try:
        return found.cast(text), []
    except pa.ArrowInvalid:  # of a slice, a cast reads the others' entries too: it may be one of them
        return _halved(_rows(found, 0, len(found)), text)


def _halved(found: pa.Array, text: pa.DataType) -> tuple[pa.Array, list[int]]:
    """In halves of halves, to know which rows are wrong: row by row, one of them would cost what all of them do."""
    try:
        return found.cast(text), []
    except pa.ArrowInvalid:
        if len(found) == 1:
            return pa.nulls(1, text), [0]
    half = len(found) // 2
    first, wrong = _halved(_rows(found, 0, half), text)
    second, more = _halved(_rows(found, half, len(found)), text)
    return pa.concat_arrays([first, second]), [*wrong, *(half + i for i in more)]


def _rows(found: pa.Array, start: int, stop: int) -> pa.Array:
    """A copy that holds no entries but its own."""
    return found.take(pa.array(np.arange(start, stop)))
