"""What a case is, and what all of them have in common: the request that they change, the model and its template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockyard.errors import Reason
from tests.unit.gateway.fronts.parity.asking import parameter_of

if TYPE_CHECKING:
    from tests.unit.gateway.fronts.parity.asking import Ask
    from tests.unit.gateway.fronts.parity.fronts import Front

# The model of the fake scheduler.
VOCAB_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS = 4096, 1024, 24
SEED = 5
# What the fake scheduler answers to that seed.
TOKEN_IDS = [5 + (SEED + 104729 * (position + 1)) % 4000 for position in range(6)]
NOT_IN_OPENAI = "the OpenAI API has no such parameter; vLLM has none either"
NO_CHOICE_OF_SEVERAL = "over gRPC there is no tool_choice of several tools"
CALL = {"id": "call-1", "name": "look_up", "arguments": '{"word": "yard"}'}
LONG_TEXT = "once " * MAX_MODEL_LEN
BAD_WORD = "the"
HI = [{"role": "user", "content": "Once upon a time"}]

# What every request asks for, unless a case says otherwise.
COMMON: Ask = {"sampling.seed": SEED, "stop.max_tokens": len(TOKEN_IDS)}
BASE: dict[str, Ask] = {
    "text": {"prompt": "Once upon a time"},
    "chat": {"conversation.messages": HI, "conversation.parse_answer": True},
}

# Shows everything that a message may have, behind it what else there is, and refuses or forgets if it is told to.
TEMPLATE = (
    # It speaks hermes.
    "{# <tool_call> arguments #}"
    "{{ bos_token }}"
    "{% if refuse is defined %}{{ raise_exception('not like this') }}{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if mood is defined %}{{ mood | tojson }}{% endif %}"
    "{% for message in messages %}"
    "<|{{ message.role }}|>"
    "{% for name in ['name', 'tool_calls', 'tool_call_id', 'reasoning_content'] %}"
    "{% if name in message %}{{ message[name] | tojson }}{% endif %}"
    "{% endfor %}"
    "{% if forget is not defined %}{{ message.content }}{% endif %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """One thing that is asked of every front that it concerns.

    Attributes:
        name: of the case.
        asked: beside what every request asks for; None takes one of these away.
        wrong: the fields that are told, in the proto's paths; none for what is answered.
        reason: of each of them.
        only: the wire that can say it, where `why` tells why the other cannot.
        family: the calls that it concerns, if that is not plain from what is asked.
        has_effect: the answer, or what the scheduler is asked, is another one than without.
    """

    name: str
    asked: Ask
    wrong: tuple[str, ...] = ()
    reason: Reason = Reason.FIELD_INVALID
    only: str = ""
    why: str = ""
    family: str = ""
    has_effect: bool = True

    def concerns(self, front: Front) -> bool:
        """Whether it is asked there."""
        if any(path.startswith("conversation.") for path in self.asked):
            family = "chat"
        elif "prompt" in self.asked:
            family = "text"
        else:
            family = self.family
        return family in ("", front.family) and self.only in ("", front.wire)

    def fields(self, front: Front) -> list[str]:
        """What is told there to be wrong."""
        return sorted(field if front.wire == "grpc" else parameter_of(field, front.family) for field in self.wrong)

    def ask(self, front: Front) -> Ask:
        """What is asked there, but for the request's id."""
        asked = {**BASE[front.family], **COMMON, **self.asked}
        return {path: value for path, value in asked.items() if value is not None}


def named(case: Case, request_id: str) -> Case:
    """The same case under a request's name, unless it brings one."""
    return case if "request_id" in case.asked else replace(case, asked={**case.asked, "request_id": request_id})
