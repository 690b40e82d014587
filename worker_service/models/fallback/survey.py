"""Surveys the attention calls of a network before its weights are read, with one forward pass on the meta device.

Unsupported calls are refused: a keyword that would change numbers, a mask other than a causal one with a window, heads
that differ between layers. Otherwise the network would run without an error and give wrong results.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from blockyard.model_config.fields import unusable
from blockyard_kernels.shapes import AttentionShape
from worker_service.models.fallback.attention import IMPLEMENTATION, Site, attending
from worker_service.models.fallback.fusing import FusedInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from blockyard.errors import BlockyardError

SURVEY_TOKENS = 8
# The most positions over which a mask is tested.
MAX_MASK_LENGTH = 1 << 20
# Keywords of attention that change no result here: their values are known otherwise, or only matter for training.
_HARMLESS = frozenset(
    ("position_ids", "use_cache", "output_router_logits", "output_attentions", "cache_position", "layer_idx")
)
# Rotary embeddings whose frequencies depend on the longest position of a step.
_MOVING_ROTARIES = frozenset(("dynamic", "longrope"))
_READ = frozenset(("scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal"))


def refuse(architecture: str, why: str) -> BlockyardError:
    """Returns the error for a network that cannot be served with transformers' code."""
    return unusable(f"transformers' code for {architecture} cannot be served: {why}")


@dataclass(slots=True)
class Survey:
    """Handles and records the attention calls of a forward pass."""

    architecture: str
    max_model_len: int
    names: Mapping[nn.Module, str]
    sites: dict[str, Site] = field(default_factory=dict[str, Site])
    """The layers that attend, by the names of their modules, in order."""
    together: list[list[str]] = field(default_factory=list[list[str]])
    """Linear layers that read the same rows, one after another."""
    masks: list[tuple[Tensor, int | None]] = field(default_factory=list["tuple[Tensor, int | None]"])
    """The masks that the network made, each with its window."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, given: Mapping[str, Any]
    ) -> Tensor:
        """Records a layer's call, and returns a result of the right shape."""
        name = self.names[module]
        if name in self.sites:
            raise self._refuse(f"{name} attends more than once")
        if unknown := sorted(word for word in given.keys() - _READ - _HARMLESS if given[word] is not None):
            raise self._refuse(f"attention takes {', '.join(unknown)}, which our attention does not support")
        if given.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise self._refuse(f"{name} looks ahead")
        num_heads, num_kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
        if key.shape != value.shape or key.shape[3] != head_dim:
            sizes = f"{head_dim}, {key.shape[3]} and {value.shape[3]}"
            raise self._refuse(
                f"queries, keys and values have {sizes} numbers a head, and our attention takes one width"
            )
        if given.get("dropout"):
            raise self._refuse(f"{name} uses dropout in its attention")
        scale = given.get("scaling")
        scale = head_dim**-0.5 if scale is None else float(scale)
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, scale, float(given.get("softcap") or 0.0))
        self.sites[name] = Site(len(self.sites), shape, self._window(name, mask, given.get("sliding_window")))
        return query.new_empty(1, query.shape[2], num_heads, head_dim)

    def _window(self, name: str, mask: object, told: int | None) -> int | None:
        window = next((window for known, window in self.masks if known is mask), -1)
        if window == -1:
            raise self._refuse(f"{name} attends by a mask of its own, or by none")
        told = told if told is not None and told < self.max_model_len else None
        if told is not None and told != window:
            raise self._refuse(f"{name} has a window of {told} keys, and a mask of {window or 'no'} window")
        return window

    def make_mask(
        self, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], device: torch.device, **_: Any
    ) -> Tensor:
        """Records a mask that the network requests; see `transformers.AttentionMaskInterface`."""
        mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
        self.masks.append((mask, self._read_mask(mask_function)))
        return mask

    def _read_mask(self, mask_function: Callable[..., Tensor]) -> int | None:
        """Returns the window of a mask: the number of keys that the last position sees. Other positions must agree."""
        length = min(self.max_model_len, MAX_MASK_LENGTH)
        keys, zero = torch.arange(length), torch.tensor(0)
        try:
            seen = {
                position: mask_function(zero, zero, torch.tensor(position), keys)
                for position in sorted({0, 1, length // 3, length // 2, length - 2, length - 1} & set(range(length)))
            }
            window = int(seen[length - 1].sum())
            fits = all(
                torch.equal(row, (keys <= position) & (keys > position - window)) for position, row in seen.items()
            )
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            fits, window = False, 0
        if not fits:
            raise self._refuse("a mask of its attention is neither causal nor a window")
        return window if window < length else None

    def check_rotaries(self) -> None:
        """Refuses rotary embeddings whose angles depend on the other sequences of a step."""
        for module, name in self.names.items():
            kinds = getattr(module, "rope_type", None)
            kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
            if wrong := kinds & _MOVING_ROTARIES:
                # A trial would not show it, since only long texts change the angles.
                raise self._refuse(f"{name} scales its rotary positions by the longest text of a step ({wrong.pop()})")

    def check(self) -> None:
        """Refuses a network without attention, and one whose layers have heads of different shapes."""
        if not self.sites:
            raise self._refuse("none of its layers asks for attention")
        shapes = {(site.shape.num_heads, site.shape.num_kv_heads, site.shape.head_dim) for site in self.sites.values()}
        if len({shape[1:] for shape in shapes}) > 1:
            told = "; ".join(f"{heads} heads, {kv_heads} of keys, {dim} numbers" for heads, kv_heads, dim in shapes)
            raise self._refuse(f"layers differ in their heads ({told})")
        windows = {site.window for site in self.sites.values()} - {None}
        if len(windows) > 1:
            raise self._refuse(f"layers have windows of different lengths ({', '.join(map(str, windows))})")

    def _refuse(self, why: str) -> BlockyardError:
        return refuse(self.architecture, why)


@contextmanager
def _masks_of(survey: Survey) -> Generator[None]:
    """Lets the survey make the network's masks within the context. In a step networks make no masks."""
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, survey.make_mask)
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[IMPLEMENTATION]


@torch.no_grad()
def survey_network(model: nn.Module, body: nn.Module, architecture: str, max_model_len: int) -> Survey:
    """Surveys a network by passing tokens through it on the meta device.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if our attention cannot compute the calls.
    """
    survey = Survey(architecture, max_model_len, {module: name for name, module in model.named_modules()})
    survey.check_rotaries()
    ids = torch.zeros(1, SURVEY_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.empty_like(ids)
    inputs = FusedInputs(survey.names)
    hooks = [module.register_forward_pre_hook(inputs.note) for module in survey.names if type(module) is nn.Linear]
    with attending(survey), _masks_of(survey):
        # With a given mask the network does not search the positions for several packed texts.
        body(input_ids=ids, attention_mask=torch.empty_like(ids), position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    survey.together = [group for group in inputs.groups if len(group) > 1 and len(set(group)) == len(group)]
    survey.check()
    return survey
