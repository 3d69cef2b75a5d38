"""Makes SGLang start on a machine without GPU: settings, operators that torchvision lacks, memory that CUDA never sees,
fp8 blocks without a kernel, adapters without pinned memory.

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


class ChangedModule:
    """Loads one module as ever, and changes it then. A subclass names it and says how."""

    MODULE = ""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """None but for that module."""
        if name != cls.MODULE:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                cls.change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    @staticmethod
    def change(module):
        """Do to the loaded module what the subclass is for."""
        raise NotImplementedError


class HostMemoryFinder(ChangedModule):
    """Leaves out that the buffer of --enable-return-routed-experts is made known to CUDA, which SGLang 0.5.23 always
    does."""

    MODULE = "sglang.srt.mem_cache.pool_host.common"

    @staticmethod
    def change(module):
        """Replaces the function."""
        module._cuda_host_register = lambda *arguments, **options: None


class Fp8BlocksFinder(ChangedModule):
    """Multiplies by fp8 blocks where the processor has no AMX, for which SGLang 0.5.23 refuses them on a CPU: loaded,
    updated and told of as ever, but written out in the dtype of the activations for each product."""

    MODULE = "sglang.srt.layers.quantization.fp8"

    @staticmethod
    def change(module):
        """Replaces what prepares the blocks for AMX, and the product."""
        if module._is_cpu_amx_available:
            return

        def process(self, layer):
            layer.weight_scale_inv.requires_grad_(False)

        def apply(self, layer, x, bias=None):
            from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
            from torch.nn.functional import linear

            weight = block_quant_dequant(layer.weight, layer.weight_scale_inv, self.weight_block_size, x.dtype)
            return linear(x, weight, bias)

        module.Fp8LinearMethod.process_weights_after_loading_block_quant = process
        module.Fp8LinearMethod.apply = apply


class AdaptersFinder(ChangedModule):
    """Leaves out that memory for the kernels of LoRA is pinned, which SGLang 0.5.23 always does and torch without CUDA
    refuses."""

    MODULE = "sglang.srt.lora.layers"

    @staticmethod
    def change(module):
        """Replaces what makes such tensors."""
        torch = module.torch
        if torch.cuda.is_available():
            return

        def unpinned(make):
            return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)

        torch.tensor, torch.empty, torch.zeros = map(unpinned, (torch.tensor, torch.empty, torch.zeros))
        torch.Tensor.pin_memory = lambda tensor, *arguments: tensor


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
sys.meta_path[:0] = [TorchvisionFinder, HostMemoryFinder, Fp8BlocksFinder, AdaptersFinder]
