"""`python -m headrace.connections.reachable`: which services answer, and to whom.

Redis, the coordinator and the queue service are tried.

Each has to answer who holds the password or the token, and to refuse who does not. Environment:
HEADRACE_REDIS_URL, HEADRACE_REDIS_PASSWORD, HEADRACE_COORDINATOR, HEADRACE_TOKEN, and HEADRACE_TLS_* where
the services speak TLS. Exit codes: 0 all is well, 1 something is not; a line for each says what.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.config.redis_url import parse
from headrace.connections import tls, variables
from headrace.connections.redis_client import LOGIN_REFUSED, connect, login_refused
from headrace.system import terminal
from headrace.v1 import sync_pb2_grpc

_CALL_S = 5.0
_POLL_S = 1.0


class Wrong(Exception):
    """A check that failed; the text says how."""


def redis_answers() -> str:
    url = variables.redis_url()
    try:
        with connect(url, _CALL_S) as client:
            client.ping()
    except LOGIN_REFUSED as error:
        raise Wrong(login_refused(parse(url).where, error)) from None
    except redis.RedisError as error:
        raise Wrong(f"no answer: {error}") from None
    address = parse(url)
    if address.password is None:
        return f"{address.where} answers (without a password)"
    try:
        with connect(f"{address.scheme}://{address.where}", _CALL_S) as client:
            client.ping()
    except redis.AuthenticationError:
        return f"{address.where} answers, and refuses who has no password"
    raise Wrong(f"{address.where} answers without a password, too")


def coordinator_answers() -> str:
    address = variables.coordinator()
    with tls.channel(address, ()) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_CALL_S
            )
        except grpc.RpcError as error:
            raise Wrong(f"{address}: {error.code().name}: {error.details()}") from None
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            raise Wrong(f"{address} says that it does not serve")
        token = variables.token()
        # An empty stream is rejected too, but only after its token has been accepted.
        if (code := _empty_stream(channel, token)) is not grpc.StatusCode.INVALID_ARGUMENT:
            raise Wrong(f"{address} refuses our token: {code.name}")
        if not token:
            raise Wrong(f"{address} lets in who has no token: HEADRACE_TOKEN is empty")
        if (code := _empty_stream(channel, "")) is not grpc.StatusCode.UNAUTHENTICATED:
            raise Wrong(f"{address} lets in who has no token: {code.name}")
    return f"{address} answers, and refuses who has no token"


def _empty_stream(channel: grpc.Channel, token: str) -> grpc.StatusCode:
    call = sync_pb2_grpc.CoordinatorStub(channel).Member(
        iter(()), metadata=variables.bearer(token), timeout=_CALL_S
    )
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def queue_answers(url: str) -> str:
    status, text = _http("GET", f"{url}/readyz")
    if status != 200:
        problems = json.loads(text).get("problems") if text.startswith("{") else text
        raise Wrong(f"{url} is not ready: {problems}")
    status, _ = _http("POST", f"{url}/dead/none/requeue")
    if status != 401:
        raise Wrong(f"{url} answers {status} to a change without a token; it has to be 401")
    return f"{url} is ready, and changes nothing for who has no token"


def _http(method: str, url: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, method=method), timeout=_CALL_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        raise Wrong(f"no answer from {url}: {error}") from None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.connections.reachable", description=__doc__)
    parser.add_argument(
        "--queue", required=True, help="URL of the queue service, e.g. http://demo-queue:8000"
    )
    parser.add_argument("--timeout-s", type=float, default=60.0, help="longest wait for all (default: 60)")
    args = parser.parse_args(argv)
    terminal.guard()
    checks: dict[str, Callable[[], str]] = {
        "redis": redis_answers,
        "coordinator": coordinator_answers,
        "queue": lambda: queue_answers(args.queue.rstrip("/")),
    }
    deadline = time.monotonic() + args.timeout_s
    failed = False
    for name, check in checks.items():
        while True:
            try:
                print(f"ok      {name}: {check()}", flush=True)
            except Wrong as wrong:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    continue
                print(f"failed  {name}: {wrong}", flush=True)
                failed = True
            break
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
