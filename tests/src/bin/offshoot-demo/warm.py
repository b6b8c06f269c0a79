# Runs once in the template: what is slow to make is made before it is frozen.
import json
import os
import threading
import time

import numpy as np

base = np.arange(8 * 1024 * 1024, dtype=np.uint64)  # 64 MiB
total = int(base.sum())
history = []


def count(path):
    """Counts in RAM, then on disk, for ever; each tick remembers a random number."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    while True:
        history.append(os.urandom(8).hex())
        os.pwrite(fd, b"%012d" % len(history), 0)
        time.sleep(0.02)


def counters(path):
    """The counter on disk and in RAM; the disk's is read first, so it is never ahead by more than the tick in flight."""
    with open(path) as file:
        disk = int(file.read())
    return disk, len(history)
