"""The number H: requests per second of a Flask view that does nothing, on the same machine.

It is the unit in which throughput is compared, since absolute figures depend on the machine.
"""

from __future__ import annotations

from bench.clients import getter
from bench.measure import Figures, Machine, between
from bench.run import Options, Run
from bench.serve import hello_server


def hello(options: Options) -> Figures:
    """Drive the hello view with as many connections as the other rows."""
    with hello_server(options.connections) as target:
        run = Run(target, Machine(target.host, target.port, None), options)
        for _ in range(options.connections):
            run.loop.add(getter(run.control, target.get("/")))
        before, after = run.window()
        run.stop()
        figures = between(run.loop, before, after, sum(after.seen) - sum(before.seen))
    figures["messages_per_s"] = figures["requests_per_s"]
    return run.finish("hello", {"connections": options.connections} | figures)
