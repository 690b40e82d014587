"""What every peer's script is asked for: a model, a way of computing, and room for the largest batch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True, slots=True)
class Job:
    """The only argument of a script, as JSON.

    Attributes:
        model: our model's folder.
        kind: bfloat16 or int8, what weights are held and multiplied in.
        folder: where to keep what the peer makes of the model.
        num_threads: of all that it computes.
        max_num_seqs: requests of the largest batch.
        max_len: tokens of the longest request.
    """

    model: str
    kind: str
    folder: str
    num_threads: int
    max_num_seqs: int
    max_len: int

    @classmethod
    def read(cls) -> Job:
        """Reads the command line."""
        return cls(**json.loads(sys.argv[1]))

    def made(self, suffix: str) -> Path:
        """Where the peer's own form of this model is, or will be."""
        target = Path(self.folder) / f"{Path(self.model).name}-{suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        return target
