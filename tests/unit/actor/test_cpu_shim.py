"""The redirection to the CPU: refused where a GPU is, complete where it is not; the CPUs near a GPU.
Each test runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run(code: str) -> str:
    """The output of a fresh interpreter; the redirection stays in there."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_refused_where_a_gpu_is_and_nothing_changed():
    out = run("""
        import torch
        from megatron_daro.actor import device as cpu
        from megatron_daro.errors import ModelError
        torch.cuda.is_available = lambda: True
        before = (torch.zeros, torch.Tensor.cuda, torch.Tensor.type, torch.cuda.current_device)
        try:
            cpu.install()
        except ModelError as error:
            print("refused:", error)
        after = (torch.zeros, torch.Tensor.cuda, torch.Tensor.type, torch.cuda.current_device)
        print("unchanged:", before == after, "installed:", cpu._installed)
    """)
    assert "refused: actor.cpu: a GPU is available" in out
    assert "unchanged: True installed: False" in out


def test_importing_the_module_alone_changes_nothing():
    out = run("""
        import torch
        before = (torch.zeros, torch.Tensor.cuda, torch.Tensor.type)
        from megatron_daro.actor import device as cpu
        print(before == (torch.zeros, torch.Tensor.cuda, torch.Tensor.type))
    """)
    assert out.strip() == "True"


def test_nothing_is_redirected_where_a_gpu_is():
    out = run("""
        import importlib, pkgutil, sys, torch
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 8
        chosen = []
        torch.cuda.set_device = chosen.append
        import os
        os.environ["LOCAL_RANK"] = "11"
        import megatron_daro
        from megatron_daro.actor import device
        hosts = "megatron_daro.plugins."  # need the frameworks that they plug into
        for module in pkgutil.walk_packages(megatron_daro.__path__, "megatron_daro."):
            if not module.name.endswith(("actor.device", "__main__", "logprob_kernels")) and hosts not in module.name:
                importlib.import_module(module.name)
        print(device.prepare(), set(chosen), device._installed)
    """)
    assert out.strip() == "cuda:3 {3} False"


def test_every_kind_of_call_lands_on_the_cpu():
    out = run("""
        import torch
        from megatron_daro.actor import device as cpu
        cpu.install()
        cpu.install()  # a second call does nothing
        like = torch.ones(2)
        made = {
            "tensor": torch.tensor([1.0], device="cuda"),
            "zeros": torch.zeros(2, device="cuda:0"),
            "ones": torch.ones(2, device=torch.device("cuda")),
            "empty": torch.empty(2, device=torch.device("cuda", 3), pin_memory=True),
            "full": torch.full((2,), 1.0, device="cuda"),
            "arange": torch.arange(2, device=torch.cuda.current_device()),
            "rand": torch.rand(2, device="cuda"),
            "randn": torch.randn(2, device="cuda"),
            "randint": torch.randint(0, 5, (2,), device="cuda"),
            "empty_like": torch.empty_like(like, device="cuda"),
            "zeros_like": torch.zeros_like(like, device="cuda"),
        }
        assert set(made) == set(cpu._FACTORIES), set(made) ^ set(cpu._FACTORIES)
        assert all(t.device.type == "cpu" for t in made.values()), {n: t.device for n, t in made.items()}
        assert torch.zeros(1, device="meta").device.type == "meta", "other devices are left alone"
        assert like.cuda() is like and like.cuda(0, non_blocking=True) is like
        module = torch.nn.Linear(2, 2)
        assert module.cuda() is module
        torch.cuda.synchronize(); torch.cuda.set_device(0); torch.cuda.empty_cache()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            event = torch.cuda.current_stream().record_event()
            event.synchronize()
            assert event.query() is True
        like.record_stream(torch.cuda.current_stream())
        assert not torch.cuda.is_available(), "the redirection does not pretend that there is a GPU"
        print("done")
    """)
    assert out.strip() == "done"


def test_type_strings_and_conversions():
    out = run("""
        import torch
        from megatron_daro.actor import device as cpu
        cpu.install()
        x = torch.ones(2)
        print(x.type(), x.bfloat16().type(), x.half().type())
        print(x.type(torch.float64).dtype, x.type("torch.LongTensor").dtype)
    """)
    assert out.split() == [
        "torch.cuda.FloatTensor",
        "torch.cuda.BFloat16Tensor",
        "torch.cuda.HalfTensor",
        "torch.float64",
        "torch.int64",
    ]


def test_random_state_is_the_generator_of_the_cpu():
    out = run("""
        import torch
        from megatron_daro.actor import device as cpu
        cpu.install()
        import megatron.core.tensor_parallel.random as tp_random
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(4), first)
        tp_random._set_cuda_rng_state(state)
        assert torch.equal(tp_random._get_cuda_rng_state(), state)
        assert torch.equal(torch.rand(4), first)
        print("done")
    """)
    assert out.strip() == "done"


def test_the_compiler_is_not_loaded_and_fused_functions_still_compute():
    out = run("""
        import sys, torch
        from megatron_daro.actor import device as cpu
        cpu.install()
        import megatron_daro.actor.model
        from megatron.core.fusions.fused_bias_swiglu import swiglu
        x = torch.linspace(-2, 2, 8).reshape(2, 4)
        gate, up = x.chunk(2, -1)
        print("computes:", torch.equal(swiglu(x), torch.nn.functional.silu(gate) * up))
        print("with options:", torch.compile(dynamic=True)(len) is len)
        weight = torch.nn.Parameter(torch.ones(2))
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            optimizer = kind([weight], lr=0.5)
            weight.grad = torch.ones(2)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            print(weight.tolist()[0] < 1, weight.requires_grad, weight.grad)
            weight.data.fill_(1)
        print("loaded:", "torch._dynamo" in sys.modules)
    """)
    stepped = ["True True None"] * 3
    assert out.splitlines() == ["computes: True", "with options: True", *stepped, "loaded: False"]


def test_a_rank_stays_on_the_cpus_near_its_gpu():
    """In a system of two NUMA nodes as Linux shows it, with the files that torch's binding.py and ours read."""
    out = run("""
        import os, tempfile, threading
        from pathlib import Path
        from types import SimpleNamespace
        import torch
        from torch.numa import binding
        from megatron_daro.actor import device

        root, allowed = Path(tempfile.mkdtemp()), os.sched_getaffinity(0)
        near = max(allowed)
        for node, cpus in ((0, "0-255"), (1, str(near)), (2, "4000-4095")):
            (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
            (root / f"sys/devices/system/node/node{node}/cpulist").write_text(cpus + "\\n")
        buses = {"far": (0x1B, -1), "near": (0xDC, 1), "barred": (0xDD, 2), "odd": (0xDE, 7)}
        for bus, node in buses.values():
            (root / f"sys/bus/pci/devices/0000:{bus:02x}:00.0").mkdir(parents=True)
            (root / f"sys/bus/pci/devices/0000:{bus:02x}:00.0/numa_node").write_text(f"{node}\\n")
        device._PCI_DEVICES = root / "sys/bus/pci/devices"
        binding.open = lambda path: open(root / str(path).lstrip("/"))

        def bound(bus):
            gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
            torch.cuda.get_device_properties = lambda _: gpu
            return device.bind_to_numa_node(torch.device("cuda", 0))

        ended = threading.Event()
        thread = threading.Thread(target=ended.wait, daemon=True)
        thread.start()
        print(device.bind_to_numa_node(torch.device("cpu")), bound(buses["far"][0]))
        print(*bound(0x77), *bound(buses["odd"][0]), *bound(buses["barred"][0]), sep="\\n")
        print("as before:", os.sched_getaffinity(0) == allowed)
        print(bound(buses["near"][0]), os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id) == {near})
        ended.set()
    """)
    lines = out.splitlines()
    assert lines[0] == "() ()"
    assert "No such file or directory" in lines[1] and "0000:77:00.0" in lines[1]
    assert "Could not determine CPUs corresponding to numa_node_index=7" in lines[2]
    assert lines[3].startswith("a rank may use no CPU of NUMA node 2, where its GPU is")
    assert lines[4:] == ["as before: True", "() True"]
