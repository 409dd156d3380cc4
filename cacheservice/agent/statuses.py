"""The one place where refusals become gRPC statuses, for every call of every service.

An interceptor wraps each method: messages that can't be parsed and leaves of `RequestRejected` become the status that
errors.py names for them; anything else is our bug, is logged under a short id and becomes INTERNAL with that id. It
also lets nobody call what its certificate does not allow, and counts calls. Called by `serve.py` when it builds the
server.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cacheservice import errors
from cacheservice.core.protocol import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_NOT_SPOKEN,
    PROTOCOL_VERSION,
    REFUSAL,
    SPOKEN,
    TOO_MANY_LEASES,
)

_log = logging.getLogger(__name__)

_STATUS_OF: dict[type[errors.RequestRejected], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownSession: grpc.StatusCode.UNAUTHENTICATED,
    errors.UnknownObject: grpc.StatusCode.NOT_FOUND,
    errors.Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.LeaseLost: grpc.StatusCode.ABORTED,
    errors.OutOfExtent: grpc.StatusCode.OUT_OF_RANGE,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotServed: grpc.StatusCode.UNIMPLEMENTED,
}

_METADATA_OF: dict[type[errors.RequestRejected], tuple[tuple[str, str], ...]] = {
    errors.TooManyLeases: ((REFUSAL, TOO_MANY_LEASES),),
    errors.ProtocolNotSpoken: (
        (REFUSAL, PROTOCOL_NOT_SPOKEN),
        (SPOKEN, f"{OLDEST_PROTOCOL_VERSION}-{PROTOCOL_VERSION}"),
    ),
}
"""What is said beside a status that a client must tell apart from others of the same code."""

Context = grpc.ServicerContext
CheckCaller = Callable[[str, Context], None]
"""Raises Forbidden when the caller of a method (`/package.Service/Method`) may not call it."""
CountCall = Callable[[str, str, float], None]
"""Told method name, status name and seconds of each call that ended."""


class _Garbled:
    """Stands for a message that could not be parsed."""

    def __init__(self, error: str) -> None:
        self.error = error


class StatusInterceptor(grpc.ServerInterceptor):
    """Wraps every method; holds no state of calls."""

    def __init__(
        self,
        *,
        check_caller: CheckCaller,
        count_call: CountCall,
        raw_requests: Collection[str] = (),
        raw_responses: Collection[str] = (),
    ) -> None:
        """Methods of `raw_requests` get bytes, those of `raw_responses` give bytes."""
        self._check_caller = check_caller
        self._count_call = count_call
        self._raw_requests = raw_requests
        self._raw_responses = raw_responses

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: Any
    ) -> Any:
        """See grpc.ServerInterceptor."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        is_raw = method in self._raw_requests
        deserialize = None if is_raw else _tolerant(handler.request_deserializer)
        serialize = None if method in self._raw_responses else handler.response_serializer
        if handler.request_streaming and handler.response_streaming:
            call = self._streaming(method, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(call, deserialize, serialize)
        if handler.response_streaming:
            call = self._streaming(method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(call, deserialize, serialize)
        if handler.request_streaming:
            call = self._single(method, handler.stream_unary)
            return grpc.stream_unary_rpc_method_handler(call, deserialize, serialize)
        call = self._single(method, handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(call, deserialize, serialize)

    def _single(
        self, method: str, behaviour: Callable[[Any, Context], Any]
    ) -> Callable[[Any, Context], Any]:
        name = method.rpartition("/")[2]

        def call(request: Any, context: Context) -> Any:
            started = time.monotonic()
            status, message = grpc.StatusCode.OK, ""
            response = None
            try:
                self._check_caller(method, context)
                response = behaviour(_checked(request, method), context)
            except Exception as error:  # noqa: BLE001 - the outermost frame of a call
                status, message = _translate(method, error, context)
            self._count_call(name, status.name, time.monotonic() - started)
            if status is not grpc.StatusCode.OK:
                context.abort(status, message)
            return response

        return call

    def _streaming(
        self, method: str, behaviour: Callable[[Any, Context], Any]
    ) -> Callable[[Any, Context], Any]:
        name = method.rpartition("/")[2]

        def call(request: Any, context: Context) -> Iterator[Any]:
            started = time.monotonic()
            status, message = grpc.StatusCode.OK, ""
            try:
                self._check_caller(method, context)
                yield from behaviour(_checked(request, method), context)
            except Exception as error:  # noqa: BLE001 - the outermost frame of a call
                status, message = _translate(method, error, context)
            finally:
                # Also when the client left: then gRPC closes the generator.
                self._count_call(name, status.name, time.monotonic() - started)
            if status is not grpc.StatusCode.OK:
                context.abort(status, message)

        return call


def _translate(method: str, error: Exception, context: Context) -> tuple[grpc.StatusCode, str]:
    if isinstance(error, errors.RequestRejected):
        status = next((code for leaf, code in _STATUS_OF.items() if isinstance(error, leaf)), None)
        if status is not None:
            if type(error) in _METADATA_OF:
                context.set_trailing_metadata(_METADATA_OF[type(error)])
            return status, str(error)
    if not context.is_active():
        return grpc.StatusCode.CANCELLED, "the caller went away"
    fault = secrets.token_hex(4)
    _log.error("call failed method=%s fault=%s", method, fault, exc_info=error)
    return (
        grpc.StatusCode.INTERNAL,
        f"the agent failed, fault {fault}; its log says why under that id",
    )


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def parse(serialized: bytes) -> Any:
        try:
            return deserialize(serialized)
        except DecodeError as error:
            # gRPC would say INTERNAL and log a stack for what is the caller's mistake.
            return _Garbled(str(error))

    return parse


def _checked(request: Any, method: str) -> Any:
    if isinstance(request, _Garbled):
        raise _garbled(method)
    if hasattr(request, "__next__"):
        return _CheckedStream(request, method)
    return request


class _CheckedStream:
    """The requests of a stream; raises on the first that can't be parsed."""

    def __init__(self, requests: Iterator[Any], method: str) -> None:
        self._requests = requests
        self._method = method

    def __iter__(self) -> _CheckedStream:
        return self

    def __next__(self) -> Any:
        request = next(self._requests)
        if isinstance(request, _Garbled):
            raise _garbled(self._method)
        return request


def _garbled(method: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"the message to {method} can't be parsed: it is truncated, garbled or of another contract; send messages of "
        "cacheservice.v1"
    )
