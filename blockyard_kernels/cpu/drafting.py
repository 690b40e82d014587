"""The drafting ops in C++. See `blockyard_kernels.drafting`; the search is csrc/drafting.h."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from blockyard_kernels.drafting import Drafts

if TYPE_CHECKING:
    from blockyard_kernels.cpu.library import Library
    from blockyard_kernels.drafting import DraftRows


class _DraftRows(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("most", ctypes.c_void_p),
        ("predicted", ctypes.c_void_p),
        ("num_predicted", ctypes.c_void_p),
        ("num_drafts", ctypes.c_void_p),
        ("num_matched", ctypes.c_void_p),
    )


class CpuDrafting:
    def __init__(self, library: Library) -> None:
        self._library = library

    def find_drafts(self, wanted: DraftRows) -> Drafts:
        """Writes the drafts of all rows in one call, in the calling thread."""
        count, table, texts = len(wanted.rows), wanted.token_ids, wanted.predicted
        # Rows, lengths, drafts wanted; then the addresses and lengths of second texts; then what is found.
        columns = np.zeros((7, count), np.int64)
        columns[0], columns[1], columns[2] = wanted.rows, wanted.lengths, wanted.most
        for place, text in enumerate(texts):
            if text is not None:
                columns[3:5, place] = text.ctypes.data, len(text)
        begin, size = columns.ctypes.data, columns.strides[0]
        addresses = range(begin, begin + 7 * size, size) if count else (None,) * 7
        stride = table.strides[0] // table.itemsize
        self._library.find_drafts(_DraftRows(count, wanted.vocab_size, table.ctypes.data, stride, *addresses))
        return Drafts(columns[5], columns[6])
