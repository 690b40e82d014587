"""The tokenizers of adapters, which may differ from the model's.

An adapter's folder is on the workers' machines; this machine must have it below a root, at the same path. If the folder
lacks a file, the model's file is used. Sends nothing, and knows no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason, quote
from blockyard.paths import find_below
from gateway.text.tokenizer_files import load_adapter_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.contract.scheduling import Adapter
    from gateway.text.tokenizer import Tokenizer

MAX_KNOWN = 64
"""The number of adapters whose tokenizers are kept: the least recently used one is dropped and read again."""


class AdapterTokenizers:
    """Finds the tokenizer of an adapter. Safe to call from several threads.

    Args:
        model: the model's tokenizer.
        root: the folder below which adapters lie; None: all use the model's tokenizer.
    """

    def __init__(self, model: Tokenizer, root: Path | None) -> None:
        self.model = model
        self._root = root
        self._known: OrderedDict[int, Tokenizer] = OrderedDict()
        self._lock = Lock()

    def knows(self, adapter: Adapter | None) -> bool:
        """Returns whether `of` answers without reading files."""
        return adapter is None or self._root is None or adapter.lora_id in self._known

    def of(self, adapter: Adapter | None) -> Tokenizer:
        """Returns the tokenizer of requests with an adapter; raises BlockyardError MODEL_NOT_LOADED."""
        if adapter is None or self._root is None:
            return self.model
        with self._lock:
            tokenizer = self._known.pop(adapter.lora_id, None) or self.read(adapter.name, adapter.path)
            self._known[adapter.lora_id] = tokenizer
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return tokenizer

    def read(self, name: str, path: str) -> Tokenizer:
        """Reads the tokenizer in an adapter's folder.

        Raises BlockyardError: FIELD_INVALID for an invalid path; PERMISSION_DENIED for a folder that is not below the
        root; MODEL_NOT_LOADED if the folder is not on this machine or a file cannot be read.
        """
        if self._root is None:
            return self.model
        try:
            folder = find_below(self._root, path, "path", "--gateway-lora-root")
        except BlockyardError as error:
            if error.reason is not Reason.MODEL_NOT_LOADED:
                raise
            message = (
                f"the gateway does not find the folder {path} of the adapter {quote(name)}, which may have a "
                "tokenizer: mount the adapters on the gateways too, or start the gateways without --gateway-lora-root"
            )
            raise BlockyardError(Reason.MODEL_NOT_LOADED, message) from None
        return load_adapter_tokenizer(folder, self.model, self._root)


def require_vocabulary(name: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises BlockyardError MODEL_NOT_LOADED for an adapter whose tokenizer has ids beyond the model's."""
    if tokenizer.num_ids > vocab_size:
        message = (
            f"the tokenizer of the adapter {quote(name)} has {tokenizer.num_ids} ids and the model {vocab_size}: "
            "adapters that add tokens to the model's are not supported"
        )
        raise BlockyardError(Reason.MODEL_NOT_LOADED, message)
