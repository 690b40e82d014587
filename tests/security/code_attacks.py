"""Attacks that bring code, or reach elsewhere."""

from __future__ import annotations

from tests.security.attack import (
    ANSWERED,
    CHAT,
    COMPLETIONS,
    GRPC,
    INVALID,
    MESSAGES,
    NO_MODEL,
    NO_ROUTE,
    PICKLED,
    RESPONSES,
    TOKENIZE,
    UNSUPPORTED,
    Ask,
    Attack,
    conversation,
)

CODE = (
    Attack(
        "a prompt of pickled or sparse tensors",
        "vLLM",
        ("CVE-2025-62164", "CVE-2026-56340", "CVE-2026-73557"),
        "`prompt_embeds` went through `torch.load`: memory was overwritten, at worst code ran",
        "prompts are text or ids: refused, and nothing is unpickled",
        (Ask(COMPLETIONS, {"prompt_embeds": PICKLED}, UNSUPPORTED), Ask(CHAT, {"prompt_embeds": PICKLED}, INVALID)),
    ),
    Attack(
        "a pickled logits processor",
        "SGLang",
        ("CVE-2026-7304",),
        "the parameter was unpickled: code ran",
        "there is no such parameter: refused",
        (
            Ask(COMPLETIONS, {"custom_logit_processor": PICKLED}, INVALID),
            Ask(CHAT, {"logits_processors": [PICKLED]}, UNSUPPORTED),
        ),
    ),
    Attack(
        "weights and adapters as pickles over HTTP",
        "SGLang",
        ("CVE-2025-10164", "CVE-2026-86793", "CVE-2026-15969"),
        "routes without a key unpickled what was sent: code ran",
        "there are no such routes, and what operators may do has a port of its own",
        tuple(
            Ask("", {"serialized_named_tensors": [PICKLED]}, NO_ROUTE, path)
            for path in ("/update_weights_from_tensor", "/load_lora_adapter_from_tensors", "/v1/load_lora_adapter")
        ),
    ),
    Attack(
        "a pickle on a socket",
        "vLLM, SGLang",
        ("CVE-2025-32444", "GHSA-hj4w-hm2g-p6w5", "CVE-2026-3059", "CVE-2026-3060"),
        "sockets between the processes unpickled what anybody sent: code ran",
        "every port is sent the pickle: it closes the connection, and nothing is unpickled",
        by="send_pickles",
    ),
    Attack(
        "a chat template in the request",
        "vLLM",
        ("CVE-2026-115911", "GHSA-542m-9234-8gvf", "PYSEC-2026-4349"),
        "the template, or one in `chat_template_kwargs`, was rendered without a limit of time or size",
        "templates come from the operator: refused, or taken as a variable that the template does not read",
        (
            Ask(CHAT, {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, UNSUPPORTED),
            Ask(CHAT, {"chat_template_kwargs": {"chat_template": "{{ 'x' * 10**9 }}"}}, ANSWERED),
            Ask(RESPONSES, {"chat_template_kwargs": {"chat_template": "{{ 'x' * 10**9 }}"}}, INVALID),
            Ask(TOKENIZE, {"chat_template": "{{ 'x' * 10**9 }}", **conversation("x")}, UNSUPPORTED),
        ),
    ),
    Attack(
        "variables that change how the template is called",
        "vLLM",
        ("CVE-2025-62426", "GHSA-69j4-grxj-j64p"),
        "`tokenize: true` in `chat_template_kwargs` tokenized in the event loop, which held everybody up",
        "variables are the template's alone: they reach no function",
        (
            Ask(CHAT, {"chat_template_kwargs": {"tokenize": True, "return_dict": True}}, ANSWERED),
            Ask(CHAT, {"chat_template_kwargs": {"messages": [], "bos_token": "x" * 100}}, INVALID),
        ),
    ),
    Attack(
        "calls of tools that are evaluated",
        "vLLM, Xinference",
        ("CVE-2025-9141", "CVE-2026-61539"),
        "the arguments that a model wrote went through `eval`: code ran",
        "a dialect of Python's literals is parsed, not evaluated",
        by="parse_hostile_calls",
    ),
)

REACH = (
    Attack(
        "pictures from inside the network",
        "vLLM, LMDeploy",
        ("CVE-2026-24779", "GHSA-qh4c-xf7m-gxfc", "CVE-2026-25960", "CVE-2026-33626", "GHSA-6w67-hwm5-92mq"),
        "the server fetched any address that a message named, such as a cloud's metadata",
        "refused, and the address that is named gets no connection",
        by="name_addresses",
    ),
    Attack(
        "pictures in a text",
        "TGI",
        ("CVE-2026-0599", "GHSA-j7x9-7j54-2v3h"),
        "a Markdown image in the prompt was fetched, whatever its size",
        "text is text: answered, and nothing is fetched",
        by="name_addresses_in_texts",
    ),
    Attack(
        "an address in a header",
        "vLLM",
        ("CVE-2026-116176",),
        "`X-Request-Id` named the peer to which the worker connected",
        "answered, and nothing is connected to",
        by="name_addresses_in_headers",
    ),
    Attack(
        "options of media and of transfers",
        "vLLM",
        ("CVE-2026-105758", "GHSA-x6mc-67gf-chw4", "CVE-2026-94626"),
        "`media_io_kwargs` and `kv_transfer_params` with huge numbers filled memory",
        "there are no such parameters: refused",
        (
            Ask(CHAT, {"media_io_kwargs": {"video": {"fps": 10**9, "max_frames": 10**9}}}, UNSUPPORTED),
            Ask(TOKENIZE, {"media_io_kwargs": {"video": {"fps": 10**9}}}, INVALID),
            Ask(COMPLETIONS, {"kv_transfer_params": {"tp_size": 10**12}}, UNSUPPORTED),
        ),
    ),
    Attack(
        "paths in names",
        "Ollama, SGLang, Triton",
        ("CVE-2024-37032", "CVE-2026-103663", "CVE-2026-7302", "CVE-2025-23316"),
        "digests, file names and names of models with `../` read, wrote or ran files elsewhere",
        "names are looked up in a list: refused. Adapters are loaded by operators, below a folder that is set",
        (
            *(
                Ask(front, {"model": "../../../etc/passwd"}, NO_MODEL)
                for front in (GRPC, COMPLETIONS, CHAT, RESPONSES, MESSAGES, TOKENIZE)
            ),
            Ask("", {"text_input": "x"}, NO_MODEL, "/v2/models/..%2f..%2fetc%2fpasswd/generate"),
            Ask("", {"name": "../../etc"}, NO_ROUTE, "/api/pull"),
        ),
    ),
    Attack(
        "adapters outside their folder",
        "vLLM, Ollama",
        (),
        "of the same kind",
        "refused on the admin port",
        by="load_adapters_elsewhere",
    ),
    Attack(
        "cancelling the requests of others",
        "SGLang",
        ("CVE-2026-112266",),
        "an id of one letter ended all requests whose ids begin with it",
        "ids are compared as a whole: nothing is cancelled",
        by="cancel_by_prefix",
    ),
    Attack(
        "prompts of others, by the time of the first token",
        "vLLM",
        ("CVE-2025-46570", "GHSA-4qjh-9fv9-r85r", "GHSA-rm76-4mrf-v9r8"),
        "a prompt that another user had sent was answered sooner; equal hashes gave another prompt's cache",
        "tenants have prefixes of their own, by SHA-256: no token of the other tenant's prompt is found",
        by="look_for_prefixes",
    ),
)
