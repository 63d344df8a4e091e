"""Child process of `test_json_line_worker`; each request names an action."""

import os
import signal
import sys
import time
from typing import Any

from anyaccel.processes.json_line_worker import connecting_to_parent


def handle(request: Any) -> Any:
    match request:
        case "raise":
            raise ValueError("seven")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(60)
        case "print":
            print("printed")
            os.write(1, b"written\n")
            os.system("echo by another process")
            return sys.stdin.read()
        case "describe":
            return [os.getpid(), sys.argv[1:], os.environ.get("FLAVOUR"), os.getcwd(), sys.path[0]]
    return request


if __name__ == "__main__":
    print("before the connection")
    with connecting_to_parent() as (requests, answer):
        for request in requests:
            answer(handle(request))
    print("a clean end")
