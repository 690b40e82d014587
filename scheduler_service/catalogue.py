"""Declares the scheduler's metrics. Those of a replica have its number as a label, and start at 0 with it."""

from __future__ import annotations

from blockyard.service.metrics import counter, declared_in, gauge, geometric, histogram

PHASES = ("schedule", "encode", "wait", "execute", "update")
DIED, DRAINED, STEP_REFUSED, ANSWERED_WRONG = "died", "drained", "refused", "wrong"
WORKER, SCHEDULER = "worker", "scheduler"

_COUNTS = tuple(float(2**power) for power in range(15))
_STEP_SECONDS = geometric(20e-6, 10)

REQUESTS = gauge(
    "blockyard_requests", "Live requests: `waiting` for a replica, or `running`, which a replica has taken.", "state"
)
WAITING_TOKENS = gauge(
    "blockyard_waiting_tokens",
    "Tokens that wait to be computed: of the prompts that wait for a replica, and of the sequences that wait at one.",
)
SEQUENCES = gauge(
    "blockyard_sequences",
    "Sequences at a replica: `running`, `swapped` out, or `waiting`, most of which were preempted.",
    "replica",
    "state",
)
BLOCKS = gauge(
    "blockyard_blocks",
    "KV blocks of a pool (`device` or `host`): `used` by sequences, or `free`, what is cached in them among these.",
    "replica",
    "pool",
    "state",
)
CACHED_BLOCKS = gauge(
    "blockyard_cached_blocks", "KV blocks whose content prompts can find again, used or free.", "replica", "pool"
)
QUERY_TOKENS = counter(
    "blockyard_prefix_cache_query_tokens_total", "Prompt tokens that were looked up in the prefix cache.", "replica"
)
HIT_TOKENS = counter(
    "blockyard_prefix_cache_hit_tokens_total", "Prompt tokens that were found in the prefix cache.", "replica"
)
PROMPT_TOKENS = counter(
    "blockyard_prompt_tokens_total", "Tokens of prompts that were prefilled, cached ones too.", "replica"
)
GENERATED_TOKENS = counter(
    "blockyard_generated_tokens_total",
    "Tokens that were sampled and taken, each once, also behind a stop string, where nobody is sent them.",
    "replica",
)
DRAFT_TOKENS = counter(
    "blockyard_draft_tokens_total",
    "Tokens that were drafted: guessed, and computed beside the known ones. source: suffix, what followed the same ids "
    "earlier in the sequence; forced, by a grammar; prediction, what the request predicts.",
    "replica",
    "source",
)
ACCEPTED_TOKENS = counter(
    "blockyard_accepted_tokens_total",
    "Drafts that were right. Each saved a step of its sequence; they count among the generated tokens, too.",
    "replica",
    "source",
)
PREEMPTIONS = counter(
    "blockyard_preemptions_total",
    "Preemptions, by `swap` (blocks moved to the host) or `recompute`.",
    "replica",
    "mode",
)
MOVED_BLOCKS = counter(
    "blockyard_moved_blocks_total",
    "Blocks that were moved: swapped `out` to the host, swapped `in`, or a `copy` of a shared one that was to change.",
    "replica",
    "direction",
)
GIVEN_BACK_BLOCKS = counter(
    "blockyard_given_back_blocks_total",
    "Blocks that running sequences gave back since all their later queries see other tokens: behind a window.",
    "replica",
)
STEPS = counter("blockyard_steps_total", "Steps that were answered.", "replica")
STEPS_IN_FLIGHT = gauge("blockyard_steps_in_flight", "Steps that were sent and are not answered.", "replica")
WORKERS = gauge(
    "blockyard_workers",
    "Workers by state, all ranks of all replicas: `RUNNING` takes steps.",
    "state",
)
LEFT_ASIDE = gauge(
    "blockyard_workers_left_aside",
    "Workers that are not tried for now, since one epoch after another broke before it had answered two steps.",
)
READY_REPLICAS = gauge("blockyard_ready_replicas", "Replicas that take steps.")
GATEWAYS = gauge("blockyard_attached_gateways", "Gateways that are attached.")
STEP_SECONDS = histogram(
    "blockyard_step_seconds",
    "A step by phase: `schedule` chooses it, `encode` makes a message of it, `wait` is from when the worker could begin"
    " it (it was sent, and the one before was answered) to its answer, `execute` what the worker was busy of that, by"
    " its own clock, `update` takes the answer.",
    _STEP_SECONDS,
    "phase",
)
STEP_SEQUENCES = histogram("blockyard_step_sequences", "Sequences that a step computes.", _COUNTS)
STEP_TOKENS = histogram("blockyard_step_tokens", "Tokens that a step computes.", _COUNTS)
QUEUE_SECONDS = histogram(
    "blockyard_queue_seconds",
    "From a request's arrival to a replica's taking it; once more where that one is lost before it began.",
    geometric(0.001, 500),
)
CANCEL_SECONDS = histogram(
    "blockyard_cancel_to_free_seconds",
    "From the word that a request or one of its sequences is to end, by a cancel, a lost client, a stop string or a"
    " deadline, to the end of the last step that still computes it. Its blocks are given to others in the next one.",
    geometric(0.001, 10),
)
REFUSED = counter(
    "blockyard_refused_requests_total",
    "Requests that were not let in, by reason. Load is shed with `QUEUE_FULL`, `TOKEN_BACKLOG` and `TENANT_QUOTA`.",
    "reason",
)
FAILED = counter(
    "blockyard_failed_requests_total", "Requests that ended with an error once they were let in, by reason.", "reason"
)
LOSSES = counter(
    "blockyard_worker_losses_total",
    "Epochs that broke: the worker `died` (or hangs, or its connection broke), was `drained`, `refused` a step, or gave"
    " a `wrong` answer, one that cannot be.",
    "cause",
)
RECOVERIES = counter(
    "blockyard_recovered_requests_total",
    "Requests with tokens that went on after their `worker`, or the `scheduler` before this one, was lost.",
    "lost",
)
RECOMPUTED = counter(
    "blockyard_recomputed_tokens_total", "Tokens, prompt and output, that these had to have computed again.", "lost"
)
INEXACT = counter(
    "blockyard_inexact_recoveries_total",
    "Recoveries from the loss of a worker after which an answer need not be, bit for bit, what it would have been.",
)
LORAS = gauge(
    "blockyard_lora_adapters",
    "Adapters at a replica: `loaded` into the host's cache, or `resident` in a slot of the device too.",
    "replica",
    "state",
)
LORA_LOAD_SECONDS = histogram(
    "blockyard_lora_load_seconds", "Loads of an adapter at all workers of a replica.", geometric(0.001, 100)
)
LORA_EVICTIONS = counter(
    "blockyard_lora_evictions_total",
    "Adapters that left the host's cache of a replica for others: more are in use than --max-cpu-loras.",
    "replica",
)
LORA_PASSED_SECONDS = counter(
    "blockyard_lora_passed_seconds_total",
    "Time that an adapter waited for a slot while requests without it began.",
    "replica",
    "adapter",
)

CATALOGUE = declared_in(globals())
