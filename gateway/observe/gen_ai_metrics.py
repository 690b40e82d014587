"""Measures generations under OpenTelemetry's names for servers of generative AI, as Prometheus spells these names.

The conventions are experimental, so OpenTelemetry's own switch turns them on: the variable
OTEL_SEMCONV_STABILITY_OPT_IN with `gen_ai_latest_experimental` among its values. Bounds and labels are those of
open-telemetry/semantic-conventions-genai, docs/gen-ai/gen-ai-metrics.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.service.metrics import declared_in, histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blockyard.service.metrics import Histogram, Metric, Registry

SWITCH = "OTEL_SEMCONV_STABILITY_OPT_IN"
OPT_IN = "gen_ai_latest_experimental"
CHAT, TEXT_COMPLETION = "chat", "text_completion"
_PROVIDER = "blockyard"
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")

REQUEST_DURATION = histogram(
    "gen_ai_server_request_duration_seconds",
    "From a request's arrival to its end; of one that failed, `error_type` is the reason.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(*_LABELS, "error_type"),
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time for each token after the first, of a whole answer.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *_LABELS,
)
TIME_TO_FIRST_TOKEN = histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "From the arrival to the first token, of a whole answer.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *_LABELS,
)

CATALOGUE = declared_in(globals())


def is_opted_in(environment: Mapping[str, str]) -> bool:
    return OPT_IN in {value.strip() for value in environment.get(SWITCH, "").split(",")}


class GenAiMetrics:
    """The values of the metrics. Only the event loop writes them.

    Args:
        registry: the gateway's metrics, to which these are added.
        models: the names of the served models, whose series are exposed from the start.
    """

    def __init__(self, registry: Registry, models: Iterable[str]) -> None:
        self._registry = registry
        registry.extend(CATALOGUE)
        for model in models:
            for operation in (CHAT, TEXT_COMPLETION):
                for metric in CATALOGUE:
                    self.of(metric, operation, model)

    def of(self, metric: Metric, operation: str, model: str, error: str = "") -> Histogram:
        """Returns the histogram of an operation on a model. `error`: the reason why the requests failed."""
        others = (error,) if metric is REQUEST_DURATION else ()
        return self._registry.histogram(metric, operation, _PROVIDER, model, model, *others)
