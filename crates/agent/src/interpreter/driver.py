"""Runs code for offshoot-agent, in the namespace of `__main__`.

Descriptor 3 carries requests and answers: four bytes of length (big-endian), then JSON. Standard output and error are
the code's own, and that of its subprocesses; the agent reads them apart. A seed arrives on descriptor 4, announced by a
signal, so that it is used at once even while code runs.
"""

import ast
import gc
import json
import linecache
import math
import os
import signal
import sys
import traceback

CONTROL = 3
SEEDS = 4
RESEED_SIGNAL = 45
MAX_TEXT = 2 * 1024 * 1024
MAX_JSON_NODES = 50_000
KEPT_SOURCES = 200
AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
CO_COROUTINE = 0x80


class Driver:
    def __init__(self):
        self.pid = os.getpid()
        self.running = False
        self.late_seed = None
        self.global_names = set()
        self.sources = []
        self.loop = None
        self.namespace = sys.modules["__main__"].__dict__

    # Messages

    def receive(self):
        header = self.read(4)
        return None if header is None else json.loads(self.read(int.from_bytes(header, "big")))

    def read(self, size):
        parts = []
        while size:
            part = os.read(CONTROL, min(size, 1 << 20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def send(self, message):
        data = json.dumps(message).encode("ascii")
        data = memoryview(len(data).to_bytes(4, "big") + data)
        while data:
            data = data[os.write(CONTROL, data):]

    # Signals

    def on_interrupt(self, _signal, _frame):
        if self.running:
            raise KeyboardInterrupt

    def on_reseed(self, _signal, _frame):
        try:
            seed = os.read(SEEDS, 4096)
        except BlockingIOError:
            return
        self.reseed(seed)

    def reseed(self, seed):
        # The handler may have interrupted numpy's generator while it held its lock; then the seed is used later.
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            lock = getattr(getattr(numpy_random.mtrand._rand, "_bit_generator", None), "lock", None)
            if lock is not None:
                if not lock.acquire(blocking=False):
                    self.late_seed = seed
                    return
                lock.release()
            words = [int.from_bytes(seed[i:i + 4], "big") for i in range(0, len(seed) - 3, 4)]
            numpy_random.seed(words)
        random = sys.modules.get("random")
        if random is not None:
            random.seed(int.from_bytes(seed, "big"))
        self.late_seed = None
        os.write(SEEDS, b"1")

    # Running code

    def main(self):
        for name in ("_offshoot_sys", "_offshoot_driver"):
            self.namespace.pop(name, None)
        for descriptor in (CONTROL, SEEDS):
            os.set_inheritable(descriptor, False)
        os.set_blocking(SEEDS, False)
        signal.signal(signal.SIGINT, self.on_interrupt)
        signal.signal(RESEED_SIGNAL, self.on_reseed)
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self.send({"event": "ready"})
        while True:
            request = self.receive()
            if request is None:
                return
            answer = self.run(request)
            if os.getpid() != self.pid:
                # The code forked and this is its child: the agent talks to the parent only.
                flush()
                os._exit(0)
            if request.get("freeze"):
                # What the warm-up made stays: the collector need not touch (and so copy) it in every clone.
                gc.collect()
                gc.freeze()
            if self.late_seed is not None:
                self.reseed(self.late_seed)
            self.send(answer)

    def run(self, request):
        self.set_globals(request["env"])
        saved = {name: os.environ.get(name) for name in request["vars"]}
        os.environ.update(request["vars"])
        answer = {"event": "done"}
        try:
            try:
                self.running = True
                self.send({"event": "started"})
                value = self.evaluate(request["code"], request["file"])
                if value is not None:
                    self.namespace["_"] = value
                    answer["result"] = describe_value(value)
            finally:
                self.running = False
        except BaseException as error:  # SystemExit and KeyboardInterrupt, too: the interpreter goes on.
            answer.pop("result", None)
            answer["error"] = describe_error(error)
        for name, old in saved.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old
        flush()
        return answer

    def set_globals(self, env):
        for name in self.global_names - env.keys():
            os.environ.pop(name, None)
        os.environ.update(env)
        self.global_names = set(env)

    def evaluate(self, source, file):
        self.remember(source, file)
        tree = compile(source, file, "exec", ast.PyCF_ONLY_AST | AWAIT, dont_inherit=True)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = tree.body.pop()
        if tree.body:
            self.execute(compile(tree, file, "exec", AWAIT, dont_inherit=True))
        if last is None:
            return None
        value = self.execute(compile(ast.Expression(last.value), file, "eval", AWAIT, dont_inherit=True))
        return None if source.rstrip().endswith(";") else value

    def execute(self, code):
        value = eval(code, self.namespace)
        if not code.co_flags & CO_COROUTINE:
            return value
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(value)

    def remember(self, source, file):
        """Lets tracebacks show the source."""
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        self.sources.append(file)
        if len(self.sources) > KEPT_SOURCES:
            oldest = self.sources.pop(0)
            if oldest not in self.sources:
                linecache.cache.pop(oldest, None)


def flush():
    for stream in {id(s): s for s in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}.values():
        try:
            stream.flush()
        except BaseException:
            pass  # Replaced or closed by the code.


def clean(text):
    """Bounded text without lone surrogates, which JSON readers refuse."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}... [{len(text)} characters in all]"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def describe_value(value):
    text = repr(value)
    if type(value) is str:
        text = text[1:-1]
    described = {"text": clean(text)}
    if len(text) <= MAX_TEXT and count_plain(value, MAX_JSON_NODES, 0) is not None:
        described["json"] = value
    return described


def count_plain(value, left, depth):
    """`left` less the nodes of `value`, or None if it is not plain data, too deep or too large."""
    left -= 1
    if left < 0 or depth > 50:
        return None
    kind = type(value)
    if value is None or kind is bool:
        return left
    if kind is int:
        return left if -(1 << 63) <= value < 1 << 64 else None
    if kind is float:
        return left if math.isfinite(value) else None
    if kind is str:
        return left if value.isascii() or clean(value) == value else None
    if kind is list or kind is tuple:
        items = value
    elif kind is dict:
        if any(type(key) is not str or clean(key) != key for key in value):
            return None
        items = value.values()
    else:
        return None
    for item in items:
        left = count_plain(item, left, depth + 1)
        if left is None:
            return None
    return left


def describe_error(error):
    name = type(error).__name__
    try:
        value = clean(str(error))
    except BaseException:
        value = "<its text could not be made>"
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        trace = clean("".join(traceback.format_exception(type(error), error, frames)))
    except BaseException:
        trace = f"{name}: {value}\n"
    return {"name": name, "value": value, "traceback": trace}


def main():
    Driver().main()
