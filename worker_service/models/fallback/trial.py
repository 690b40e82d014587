"""Prints as JSON why transformers' code for a model cannot be served: `python -m worker_service.models.fallback.trial`.

`blockyard doctor` and `blockyard plan` run it with a folder and a dtype. Reads only config.json, and no weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from blockyard.errors import BlockyardError
from blockyard.model_config.fallback import read_outline
from worker_service.models.fallback.loading import DTYPE_OF, survey_model


def find_refusal(folder: Path, dtype: str) -> str:
    """Builds the network without its weights, and returns the reason for a refusal; empty if it can be served."""
    try:
        outline = read_outline(folder, dtype)
        survey_model(folder, outline, DTYPE_OF[outline.dtype_name])
    except BlockyardError as error:
        return error.message
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"refusal": find_refusal(Path(sys.argv[1]), sys.argv[2])}) + "\n")
