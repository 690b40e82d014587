"""The base of the routes whose errors are answered in the form of their API. Knows no API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.routing import APIRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import Request, Response


class AnsweringRoute(APIRoute):
    """A route that answers the errors of its endpoint. A subclass makes the answers."""

    @staticmethod
    def answer_error(error: Exception) -> Response:
        """Makes the answer for any error; raises an error that the application's own handlers answer."""
        raise NotImplementedError

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Makes the handler; FastAPI calls it once for each route."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:  # noqa: BLE001 - the boundary of this front
                return self.answer_error(error)

        return answer
