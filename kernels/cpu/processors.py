"""Chooses the instruction set for a processor, by a table of its features and its vendor alone.

Never by a race at start: a restart under load, another rank, or a replica on the same kind of machine must compute the
same bits. `benchmarks/instruction_sets.py` says whether the table is right on a machine: AMD's rows were measured by
it, those of Intel's follow from the rates of single instructions and a prototype on tiles.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernels.cpu.build import library_path

AMD = "AuthenticAMD"
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"})


@dataclass(frozen=True, slots=True)
class Choice:
    """An instruction set that there are kernels for.

    Attributes:
        name: of its library.
        features: what a processor must have, in the words of /proc/cpuinfo.
        maker: whose processors take it by themselves; None: everybody's. Others do when asked by name.
        emulates: for tests: another processor's arithmetic spelled out. Never taken unasked.
    """

    name: str
    features: frozenset[str]
    maker: str | None = None
    emulates: bool = False


TABLE = (
    Choice("amx", _AVX512 | {"amx_tile", "amx_bf16", "amx_int8"}),
    # Intel's processors make bfloat16 products faster by float32's instructions, as "avx512" does.
    Choice("avx512_bf16", _AVX512 | {"avx512_bf16", "avx512_vnni"}, AMD),
    Choice("avx512", _AVX512),
    Choice("avx2", frozenset({"avx2", "fma", "f16c"})),
    Choice("amx_emulated", _AVX512, emulates=True),
)
"""Best first."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor that this process runs on; without features where our kernels do not run at all."""

    maker: str
    features: frozenset[str]

    @classmethod
    def read(cls) -> Processor:
        """Reads what the system says of the first processor."""
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            return cls("", frozenset())
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        facts: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
        return cls(facts.get("vendor_id", ""), frozenset(facts.get("flags", "").split()))

    def supported(self) -> tuple[Choice, ...]:
        """Lists what it can execute, best first."""
        return tuple(choice for choice in TABLE if choice.features <= self.features)

    def chosen(self) -> tuple[Choice, ...]:
        """Lists what it takes by itself, best first: the others stand in where the best fails its self-test."""
        return tuple(each for each in self.supported() if each.maker in (None, self.maker) and not each.emulates)


@cache
def this_processor() -> Processor:
    """Returns the processor that this process runs on."""
    return Processor.read()


def supported_instruction_sets() -> tuple[str, ...]:
    """Lists this processor's instruction sets that have kernels, best first by the table; emulated ones last."""
    return tuple(choice.name for choice in this_processor().supported())


def available_instruction_sets() -> tuple[str, ...]:
    """Lists this processor's own whose library is built, best first by the table."""
    own = (choice.name for choice in this_processor().supported() if not choice.emulates)
    return tuple(name for name in own if library_path(name).exists())


def chosen_instruction_sets() -> tuple[str, ...]:
    """Lists those that "auto" takes, the first that holds, of which the library is built."""
    return tuple(each.name for each in this_processor().chosen() if library_path(each.name).exists())
