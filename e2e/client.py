"""Runs inside the client pod: sends completions to an endpoint and prints what came back. Standard library only.

Standard input is one JSON object: url, headers of all requests, requests (bodies of /v1/completions), concurrency, and
repeat_until_closed: whether to send them over and over until the file /tmp/stop appears, with as many seconds between
two of them as the file /tmp/pause says. Each line of output is one answer: index, status (0: no answer at all),
seconds, body.
"""

import concurrent.futures
import http.client
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

STOP, PAUSE = Path("/tmp/stop"), Path("/tmp/pause")
TIMEOUT_S = 60
printing = threading.Lock()


def main() -> None:
    """Read the order, carry it out."""
    order = json.load(sys.stdin)
    with concurrent.futures.ThreadPoolExecutor(order["concurrency"]) as pool:
        while True:
            list(pool.map(lambda pair: send(order, *pair), enumerate(order["requests"])))
            if not order["repeat_until_closed"] or STOP.exists():
                break


def wait_for_name(host: str | None) -> None:
    """The cluster's DNS is not on trial: its one pod may be away for a moment. Raises OSError after ten tries."""
    for left in reversed(range(10)):
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror:
            if not left:
                raise
            time.sleep(0.2)


def send(order: dict[str, object], index: int, body: dict[str, object]) -> None:
    """One request and its line of output; nothing any more once an order without end was told to stop."""
    if order["repeat_until_closed"] and STOP.exists():
        return
    url = order["url"]
    started = time.monotonic()
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **order["headers"]},
    )
    try:
        wait_for_name(urllib.parse.urlsplit(url).hostname)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            status, answer = response.status, response.read()
    except urllib.error.HTTPError as refused:
        status, answer = refused.code, refused.read()
    except (OSError, http.client.HTTPException) as problem:
        status, answer = 0, str(problem).encode()
    try:
        document = json.loads(answer)
    except ValueError:
        document = answer.decode(errors="replace")
    line = {
        "index": index,
        "status": status,
        "seconds": time.monotonic() - started,
        "body": document,
    }
    with printing:
        print(json.dumps(line), flush=True)
    if order["repeat_until_closed"]:
        time.sleep(float(PAUSE.read_text()))


if __name__ == "__main__":
    main()
