"""Rollout engines behind one Protocol (rollout/protocol.py), without Ray or Megatron.

embedded        transformers' model in this process: embedded.py -> generator.py -> decoding.py, growing_cache.py; its
                new weights: weight_stage.py. A run puts it into separate processes (runtime/embedded_engines.py)
SGLang servers  sglang/
your own        own.py: a class that the configuration names
"""
