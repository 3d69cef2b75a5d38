"""DARO: difficulty-aware reinforcement learning on Megatron-core.

The package is a set of folders, one per noun; imports go only downwards
(see docs/architecture.md). This file imports nothing, so that
`import megatron_daro.algo` and the command line stay light.
"""

__version__ = "0.1.0"
