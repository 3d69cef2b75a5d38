"""SGLang servers as a rollout engine (engine.py). The files by task, in the order in which they are used:

A request: engine.py -> generation.py (fleet.py picks a server) -> request.py -> asking.py -> client.py -> replies.py,
    which makes rollouts.
A server: interpreter.py (upstream_names.py) -> command.py -> servers.py -> process.py (watchdog.py) -> starting.py ->
    vetting.py; restarts after a failure: supervision.py.
New weights: update.py -> receiving.py, with memory.py, fp8_blocks.py, adapters.py and probe.py.
Distillation asks servers of its own: teacher.py.
"""
