"""Turns every error that a route raises into an HTTP answer in OpenAI's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from gateway.fronts.http_calls.bodies import of_details
from gateway.fronts.http_calls.errors import client_error
from gateway.fronts.openai import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import FastAPI, Request, Response

_CODES = {404: "unknown_url", 405: "method_not_allowed", 415: "unsupported_media_type"}


class AnsweringRoute(APIRoute):
    """A route that answers errors in OpenAI's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Makes the handler; FastAPI calls it once for each route."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except (HTTPException, RequestValidationError):
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of this front
                return errors.error_response(client_error(error))

        return answer


def set_boundary(app: FastAPI) -> None:
    """Makes unknown paths, and all routes that are added after this call, answer errors in OpenAI's form."""
    app.router.route_class = AnsweringRoute
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(RequestValidationError, _answer_wrong_parameters)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answers an unknown path or method, or a body of another type."""
    assert isinstance(error, HTTPException)
    fields = {
        "message": f"{error.detail}: {request.method} {request.url.path}",
        "type": "invalid_request_error",
        "param": None,
        "code": _CODES.get(error.status_code),
    }
    return errors.response(fields, error.status_code, error.headers or {})


async def _answer_wrong_parameters(_request: Request, error: Exception) -> Response:
    """Answers wrong parameters of a path or query, which FastAPI itself would answer with 422."""
    assert isinstance(error, RequestValidationError)
    return errors.error_response(of_details(error.errors(), skip=1))
