"""Makes SGLang start on a machine without GPU: settings, operators that torchvision lacks, memory that CUDA never sees.

Place in the data flow: tools/sglang_cpu_env.sh copies it into the site-packages of its environment, where
sglang_cpu.pth imports it whenever Python starts there, so in every process of a server too. It imports nothing heavy
itself. A setting that the caller gave is left as it is.
"""

import importlib.machinery
import os
import sys

SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",  # without it SGLang looks for a GPU platform and fails on a package that is not here
    "OMP_NUM_THREADS": "1",  # several servers and a trainer share the cores
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # models are directories; nothing is looked up
}

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class TorchvisionFinder:
    """Declares torchvision's operators just before its first import, if its compiled library cannot be loaded.

    torchvision registers Python functions for these operators and fails if they are unknown. Its compiled library,
    which declares them, only loads beside the torch it was built for.
    """

    operators: object = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """None always: the ordinary finders go on. Declares the operators when the name is torchvision."""
        if name == "torchvision":
            sys.meta_path.remove(cls)
            declare_operators()


class HostMemoryFinder:
    """Leaves out that the buffer of --enable-return-routed-experts is made known to CUDA, which SGLang 0.5.23 always
    does."""

    MODULE = "sglang.srt.mem_cache.pool_host.common"

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """None but for that module: it is loaded as ever, and its function then replaced."""
        if name != cls.MODULE:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                module._cuda_host_register = lambda *arguments, **options: None

            spec.loader.exec_module = exec_module
        return spec


def declare_operators():
    """Load torchvision's compiled library, or declare the operators without an implementation."""
    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    if spec is None:
        return
    from torch import library, ops

    for folder in spec.submodule_search_locations or ():
        compiled = importlib.machinery.PathFinder.find_spec("_C", [folder])
        try:
            if compiled is not None and compiled.origin:
                ops.load_library(compiled.origin)
                return
        except OSError:
            pass
    operators = library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        operators.define(schema)
    TorchvisionFinder.operators = operators  # what it declares lasts as long as the object


for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
sys.meta_path[:0] = [TorchvisionFinder, HostMemoryFinder]
