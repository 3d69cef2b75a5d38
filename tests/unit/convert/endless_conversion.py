"""A conversion whose tasks never end; prints the process ids of its workers. To be killed."""

from __future__ import annotations

import os
import time

from megatron_daro.convert import conversion


def task(*_: object) -> None:
    print(os.getpid(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    import endless_conversion

    list(conversion._each(endless_conversion.task, [(None, None, None)] * 2, 2, lambda: None))
