"""A conversion whose tasks never end; prints the process ids of its workers. To be killed, or with "starting" to lose
the process that starts the workers before it did."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from multiprocessing import forkserver

from megatron_daro.workshop.convert import conversion


def task(*_: object) -> None:
    print(os.getpid(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    import endless_conversion

    if sys.argv[1] == "starting":
        forkserver.ensure_running()
        server = forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGSTOP)  # it takes the request for a worker, and does not answer
        threading.Timer(1.0, os.kill, (server, signal.SIGKILL)).start()
    list(conversion._each(endless_conversion.task, [(None, None, None)] * 2, 2, lambda: None))
