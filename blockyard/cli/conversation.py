"""A conversation with a model, for `blockyard chat` and `blockyard run`; reads and writes no terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from blockyard.contract.chat import Message, Role
from blockyard.contract.events import Delta, Loading

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from blockyard.client.chat import ChatOptions
    from blockyard.client.sync import Client, Stream

# Options that a user may change during a conversation.
CHANGEABLE: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
}


class Conversation:
    """The messages so far, and the client that continues them.

    A model without a chat template has no conversation: `is_chat` is False, and each text is continued by itself.
    """

    def __init__(self, client: Client, options: ChatOptions, system: str = "", *, is_chat: bool = True) -> None:
        self._client = client
        self.options = options
        self.is_chat = is_chat
        self.messages: list[Message] = []
        self.begin(system)

    def begin(self, system: str) -> None:
        """Begins a new conversation with a system message; empty: without one."""
        self._system = [Message(Role.SYSTEM, system)] if system else []
        self.clear()

    def clear(self) -> None:
        self.messages = list(self._system)

    def set_option(self, name: str, value: str) -> None:
        """Sets an option of the next requests, or resets it if the value is empty. Raises ValueError."""
        if name not in CHANGEABLE:
            raise ValueError(f"there is no {name}; there are {', '.join(CHANGEABLE)}")
        options = cast("dict[str, Any]", self.options)
        if value:
            options[name] = CHANGEABLE[name](value)
        else:
            options.pop(name, None)

    def list_models(self) -> list[str]:
        """Lists the names that `choose_model` takes. Raises BlockyardError."""
        return [model.name for model in self._client.list_models()]

    def choose_model(self, name: str) -> None:
        """Continues with another model of the server. Raises ValueError if there is none, and BlockyardError."""
        models = {model.name: model for model in self._client.list_models()}
        if name not in models:
            raise ValueError(f"there is no {name}; there are {', '.join(models)}")
        self.options["model"] = name
        self.is_chat = models[name].has_chat_template

    def ask(self, text: str) -> Generator[Delta | Loading]:
        """Sends a message and yields the answer piece by piece. Keeps the text of an interrupted answer too.

        While the model is being loaded, yields how far that is.
        """
        self.messages.append(Message(Role.USER, text))
        said: list[str] = []
        try:
            with self._open(text) as stream:
                for event in stream:
                    if isinstance(event, Delta):
                        said.append(event.text)
                        yield event
                    elif isinstance(event, Loading):
                        yield event
        finally:
            if not self.is_chat:
                self.clear()
            elif any(said):
                self.messages.append(Message(Role.ASSISTANT, "".join(said)))
            else:
                # Drop the unanswered question: the next would make two user messages in a row.
                self.messages.pop()

    def _open(self, text: str) -> Stream:
        if self.is_chat:
            return self._client.stream_chat(self.messages, **self.options)
        return self._client.stream(text, **cast("dict[str, Any]", self.options))
