"""Mixers: the part of a layer that mixes the rows of a sequence, attention or a recurrence."""

from worker_service.models.mixers.attention import AttentionMixer
from worker_service.models.mixers.recurrent import RecurrentMixer

Mixer = AttentionMixer | RecurrentMixer
