"""Bindings of the compiled kernels, one library for each instruction set, and mirrors of the structures in csrc/plan.h.

A call releases the GIL while it runs.
"""

from __future__ import annotations

import ctypes
import hashlib
from enum import IntEnum
from typing import TYPE_CHECKING

from blockyard_kernels.cpu.build import library_path
from blockyard_kernels.shapes import Activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


class Kind(IntEnum):
    EMBEDDING = 0
    EMBEDDING_PACKED = 1
    RMS_NORM = 2
    LINEAR = 3
    LINEAR_GATED = 4
    SILU_AND_MUL = 5
    ROTARY_AND_CACHE = 6
    ATTENTION = 7
    HEAD = 8
    ROUND = 9
    LORA_SHRINK = 10
    LORA_EXPAND = 11
    LAYER_NORM = 12
    ADD_NORMED = 13
    ADD = 14
    ROUTE = 15
    EXPERTS_GATHER = 16
    EXPERTS_GATE_UP = 17
    EXPERTS_DOWN = 18
    EXPERTS_COMBINE = 19
    GATE = 20
    CONVOLVE = 21
    MIX = 22
    GATED_NORM = 23


class Joint(IntEnum):
    """Collective operations between ops. A recording holds them like ops, but Python runs them, not the library."""

    ADD = 100
    """All-reduces float32 rows: see `Collectives.add`."""
    ADD_BITS = 101
    """All-reduces rows that are nonzero on one rank: see `Collectives.add_bits`."""
    RECEIVE = 102
    """Receives rows from the previous pipeline stage."""
    SEND = 103
    """Sends rows to the next pipeline stage."""


class Rows(IntEnum):
    """The rows that an op works on."""

    TOKENS = 0
    CHOSEN = 1


class Scheme(IntEnum):
    UNQUANTIZED = 0
    INT8 = 1
    INT4 = 2


ACTIVATIONS: dict[Activation | None, int] = {
    None: 0,
    Activation.SILU: 1,
    Activation.GELU_TANH: 2,
    Activation.GELU_ERF: 3,
    Activation.RELU: 4,
    Activation.RELU2: 5,
    Activation.TANH: 6,
}


class LoraFactors(ctypes.Structure):
    """The two factors of an adapter for one weight; rank 0: no adapter."""

    _fields_ = (("shrink", ctypes.c_void_p), ("expand", ctypes.c_void_p), ("rank", ctypes.c_int64))


class Op(ctypes.Structure):
    """One op; pointers are addresses."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("input", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("total", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("input_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("layer_offset", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("scheme", ctypes.c_int32),
        ("leaves", ctypes.c_int32),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("lora", ctypes.c_void_p),
        ("low_rank", ctypes.c_void_p),
        ("low_rank_stride", ctypes.c_int64),
        ("low_rank_offset", ctypes.c_int64),
        ("virtual_rows", ctypes.c_void_p),
        ("first_virtual", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("rotary_size", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("softcap", ctypes.c_float),
        ("has_wide_norms", ctypes.c_int32),
        ("norms_whole_rows", ctypes.c_int32),
        ("expert_ids", ctypes.c_void_p),
        ("expert_weights", ctypes.c_void_p),
        ("expert_places", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("expert_stride", ctypes.c_int64),
        ("renormalises", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("sees_later", ctypes.c_int32),
        ("order", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("norms_follow", ctypes.c_int32),
        ("kv_scheme", ctypes.c_int32),
        ("rotary_stride", ctypes.c_int64),
        ("kv_group", ctypes.c_int64),
        ("has_gates", ctypes.c_int64),
        ("places", ctypes.c_void_p),
        ("decay_log", ctypes.c_void_p),
        ("step_bias", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("key_dim", ctypes.c_int64),
        ("is_sigmoid", ctypes.c_int32),
    )


class Inputs(ctypes.Structure):
    _fields_ = (
        ("num_sequences", ctypes.c_int64),
        ("num_new_tokens", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_chosen", ctypes.c_int64),
        ("chosen", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("best_values", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("lora_slots", ctypes.c_void_p),
        ("fixed_tables", ctypes.c_void_p),
        ("fixed_stride", ctypes.c_int64),
    )


class TilesRefused(RuntimeError):
    """The system does not let this process use AMX's registers."""


class Library:
    """The kernels for one instruction set.

    Raises:
        OSError: the library does not exist.
        RuntimeError: the structures of the library differ from those of this module.
    """

    def __init__(self, instruction_set: str) -> None:
        path = library_path(instruction_set)
        self.instruction_set = instruction_set
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._library = ctypes.CDLL(str(path))
        for name in ("op_bytes", "inputs_bytes", "panel_columns"):
            getattr(self._library, f"blockyard_{name}").restype = ctypes.c_int64
        sizes = (self._library.blockyard_op_bytes(), self._library.blockyard_inputs_bytes())
        if sizes != (ctypes.sizeof(Op), ctypes.sizeof(Inputs)):
            raise RuntimeError(f"{path} has structures of {sizes} bytes: build it anew")
        self.panel_columns: int = self._library.blockyard_panel_columns()
        self._library.blockyard_create.restype = ctypes.c_void_p
        self._library.blockyard_create.argtypes = (ctypes.c_int32,)
        self._library.blockyard_destroy.argtypes = (ctypes.c_void_p,)
        self._library.blockyard_attention_bytes.restype = ctypes.c_int64
        self._library.blockyard_attention_bytes.argtypes = (ctypes.c_void_p,)
        self._library.blockyard_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
        self._library.blockyard_phase_times.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_int32)
        sizes = (ctypes.c_int64, ctypes.c_int64)
        self._library.blockyard_pack.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p)
        self._library.blockyard_pack_int8.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            *sizes,
            *(ctypes.c_int32,) * 2,
            *(ctypes.c_void_p,) * 3,
        )
        logits = (ctypes.c_void_p, *sizes)
        self._library.blockyard_find_finite_rows.argtypes = (ctypes.c_void_p, *logits, ctypes.c_void_p)
        self._library.blockyard_spell_out.argtypes = (ctypes.c_void_p,)
        self._library.blockyard_find_drafts.argtypes = (ctypes.c_void_p,)
        self._library.blockyard_apply_masks.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._library.blockyard_choose.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._library.blockyard_token_logprobs.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    def create_executor(self, num_threads: int) -> Executor:
        """Starts a team of threads.

        Raises:
            TilesRefused: the library uses AMX, and the system does not permit it.
        """
        return Executor(self._library, num_threads, self.panel_columns)

    def spell_out(self, product: ctypes.Structure) -> None:
        """Computes a product one number at a time: see csrc/arithmetic.h."""
        self._library.blockyard_spell_out(ctypes.byref(product))

    def find_drafts(self, wanted: ctypes.Structure) -> None:
        """Writes drafts of rows: see csrc/drafting.h."""
        self._library.blockyard_find_drafts(ctypes.byref(wanted))


class Executor:
    """A team of threads that runs ops. Used by one thread at a time."""

    def __init__(self, library: ctypes.CDLL, num_threads: int, panel_columns: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self.panel_columns = panel_columns
        self.handle = library.blockyard_create(num_threads)
        if not self.handle:
            raise TilesRefused("the system refuses the tile registers of AMX to this process")

    @property
    def attention_bytes(self) -> int:
        """The most bytes that attention keeps between units of work: see csrc/attention_units.h."""
        return self.library.blockyard_attention_bytes(self.handle)

    def run(self, ops: ctypes.Array[Op], inputs: Inputs) -> None:
        """Runs ops in order over one step."""
        self.library.blockyard_run(self.handle, ops, len(ops), ctypes.byref(inputs))

    def pack(self, rows: npt.NDArray[np.uintp], num_words: int, packed: int) -> None:
        """Lays out rows of `num_words` words in panels. `rows` has the row address of each panel column, or 0."""
        num_panels = len(rows) // self.panel_columns
        self.library.blockyard_pack(self.handle, rows.ctypes.data, num_panels, num_words, packed)

    def pack_int8(self, rows: npt.NDArray[np.uintp], shape: tuple[int, int, int], packed: tuple[int, int, int]) -> None:
        """Quantizes rows and lays them out in panels.

        Args:
            rows: the columns of the panels, as in `pack`.
            shape: the number of elements of a row, their element type, and the number of leaves.
            packed: the addresses to which words, scales and sums are written.
        """
        num_panels = len(rows) // self.panel_columns
        self.library.blockyard_pack_int8(self.handle, rows.ctypes.data, num_panels, *shape, *packed)

    def phase_seconds(self) -> list[tuple[int, float]]:
        """Returns the op index and the seconds of each phase of the last run."""
        size = self.library.blockyard_phase_times(self.handle, None, None, 0)
        ops, seconds = (ctypes.c_int32 * size)(), (ctypes.c_double * size)()
        self.library.blockyard_phase_times(self.handle, ops, seconds, size)
        return list(zip(ops, seconds, strict=True))

    def find_finite_rows(self, logits: int, shape: tuple[int, int], finite: int) -> None:
        """Writes a byte for each row: 1 where all its numbers are finite."""
        self.library.blockyard_find_finite_rows(self.handle, logits, *shape, finite)

    def apply_masks(self, masks: ctypes.Structure) -> None:
        """Makes tokens impossible: see csrc/sampling.h."""
        self.library.blockyard_apply_masks(self.handle, ctypes.byref(masks))

    def choose(self, choices: ctypes.Structure) -> None:
        """Chooses tokens: see csrc/sampling.h."""
        self.library.blockyard_choose(self.handle, ctypes.byref(choices))

    def token_logprobs(self, wanted: ctypes.Structure) -> None:
        """Computes log probabilities of tokens: see csrc/sampling.h."""
        self.library.blockyard_token_logprobs(self.handle, ctypes.byref(wanted))

    def __del__(self) -> None:
        if self.handle:
            self.library.blockyard_destroy(self.handle)


def op_array(ops: Sequence[Op]) -> ctypes.Array[Op]:
    return (Op * len(ops))(*ops)
