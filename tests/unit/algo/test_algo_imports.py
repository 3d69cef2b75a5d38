"""Another framework can take the loss alone: importing it brings in torch, numpy and nothing of the rest."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import megatron_daro.algo

PROBE = """
import importlib, json, sys
import torch, numpy
before = set(sys.modules)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
print(json.dumps(sorted(name for name in sys.modules if name.startswith("megatron_daro"))))
"""


def test_imports_only_torch_numpy_and_the_standard_library():
    names = [f"megatron_daro.algo.{m.name}" for m in pkgutil.iter_modules(megatron_daro.algo.__path__)]
    assert len(names) >= 8
    done = subprocess.run([sys.executable, "-c", PROBE, json.dumps(names)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    brought, own = (json.loads(line) for line in done.stdout.splitlines())
    foreign = set(brought) - set(sys.stdlib_module_names) - {"megatron_daro", "torch", "numpy"}
    assert not foreign
    allowed = {"megatron_daro", "megatron_daro.errors", "megatron_daro.options", "megatron_daro.algo", *names}
    assert set(own) <= allowed
