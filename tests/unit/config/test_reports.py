"""What the checks find fit is said with its numbers; what fp8, servers and this machine's memory and packages allow."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from megatron_daro.config import Hardware, check, check_training, megatron_options, precision, resolve
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.precision import Surroundings, _sides, _uneven, precision_text

CPU = Hardware("cpu", 4)
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"norm_topk_prob": True, "head_dim": 8}
SERVERS = ["engine.kind=sglang", "engine.sglang.python=/usr/bin/python3"]


def report(run_files, *overrides, hardware=CPU):
    return check(resolve(run_files.file, overrides), hardware)


def test_each_check_says_what_it_found_fit(run_files):
    found = report(run_files)
    assert list(found.passed) == [
        ("model files", str(run_files.model)),
        ("data files", "1 for training, 0 for evaluation"),
        ("world size", "TP 1 * PP 1 * CP 1 * DP 1 = 1 ranks"),
        ("processes", "1 ranks, 1 engines (embedded)"),
        ("model division", "4 layers, 8 heads, 2 key-value heads"),
        ("batch", "512 samples a batch, 512 an update"),
        ("sequence budget", "5120 tokens of prompt and response in micro-batches of 16384"),
        ("precision", "bf16 on 4 cpus of this machine"),
        ("Megatron options", "0 handed on under upstream's names"),
        ("sampling", "K 8, temperature 1"),
        ("algorithm", "daro"),
        ("engine", "embedded"),
        ("seeds", "0"),
        ("run", "100 steps"),
    ]
    assert found.problems == found.warnings == ()


def test_the_numbers_are_those_of_the_run(run_files):
    run_files.set_shape(**EXPERTS)
    options = (
        "actor.tensor_parallel=2 actor.pipeline_parallel=4 actor.data_parallel=4 actor.expert_parallel=2 "
        "trainer.updates_per_batch=4 trainer.epochs_per_batch=2 engine.kind=sglang rollout.temperature=0.5 "
        'engine.sglang.urls=["http://h:1","http://h:2"] trainer.seed=7 trainer.steps=9 cluster.nodes=4 '
        "cluster.gpus_per_node=8 algorithm.name=grpo actor.megatron.bucket_size=5 rollout.rollouts_per_prompt=4"
    )
    passed = dict(report(run_files, *options.split()).passed)
    assert passed["world size"] == "TP 2 * PP 4 * CP 1 * DP 4 = 32 ranks, EP 2"
    assert passed["processes"] == "32 ranks, 2 engines (sglang)"
    assert passed["model division"] == "4 layers, 8 heads, 2 key-value heads, 4 experts"
    assert passed["batch"] == "256 samples a batch, 64 an update, 2 epochs"
    assert passed["precision"] == "bf16 on 32 gpus of the nodes of the section cluster"
    assert (passed["Megatron options"], passed["sampling"]) == (
        "1 handed on under upstream's names",
        "K 4, temperature 0.5",
    )
    assert (passed["algorithm"], passed["engine"], passed["seeds"], passed["run"]) == ("grpo", "sglang", "7", "9 steps")


def test_a_check_with_a_problem_is_not_among_those_that_passed(run_files):
    (run_files.model / "config.json").unlink()
    found = report(run_files, "rollout.temperature=0")
    assert [problem.field for problem in found.problems] == ["model.path", "rollout.temperature"]
    passed = dict(found.passed)
    assert passed["model division"] == "shape unknown" and not {"model files", "sampling"} & passed.keys()
    assert len(passed) == 12


def test_processes_and_verifiers_fit_into_the_memory_of_this_machine(run_files):
    memory = Hardware("cpu", 4, memory_bytes=2**30)
    fine = ["engine.replicas=3", "reward.workers=16"]
    assert report(run_files, *fine, hardware=memory).problems == ()
    (engines,) = report(run_files, "engine.replicas=4", hardware=memory).problems
    assert engines.field == "engine.replicas" and engines.got.startswith(
        "4, and 1 ranks: 5 processes of at least 256 MiB"
    )
    assert engines.also[-3:] == ("engine.kind", "engine.sglang.urls", "engine.sglang.tensor_parallel")
    assert engines.allowed == "what fits into 1 GiB of memory, models not counted"
    (workers,) = report(run_files, "reward.workers=17", hardware=memory).problems
    assert str(workers) == (
        "reward.workers: got 17; allowed: what fits into 1 GiB of memory, 64 MiB each at least; fix: use as many as "
        "there are free cores"
    )
    elsewhere = replace(memory, place="there")
    assert report(run_files, "engine.replicas=9", "reward.workers=99", hardware=elsewhere).problems == ()


def test_gpus_that_stay_idle_are_counted_in_whole_replicas(run_files):
    gpus = Hardware("gpu", 8, capability=9.0)
    (warning,) = report(run_files, "actor.tensor_parallel=2", "actor.data_parallel=2", hardware=gpus).warnings
    assert warning.allowed == "up to 8 ranks beside the engines"
    assert warning.fix == "set actor.data_parallel=4, or more engine.replicas, to use more GPUs"
    assert report(run_files, "actor.data_parallel=5", hardware=gpus).warnings == ()
    servers = [*SERVERS, "engine.replicas=4"]
    assert report(run_files, *servers, "actor.data_parallel=3", hardware=gpus).warnings == ()
    (warning,) = report(run_files, *servers, "actor.data_parallel=2", hardware=gpus).warnings
    assert warning.fix.startswith("set actor.data_parallel=4,")


def test_a_layout_that_is_too_large_is_said_once(run_files):
    gpus = Hardware("gpu", 8, capability=9.0)
    (problem,) = report(run_files, "actor.data_parallel=9", *SERVERS, hardware=gpus).problems
    assert problem.field == "actor" and problem.allowed == "at most 8 ranks: one per GPU of this machine"


ALL = Surroundings(9.0, (13, 0), (2, 20, 2), (9, 19), (0, 19))


@pytest.fixture
def packages(monkeypatch):
    versions = {"transformer_engine": (2, 20, 2), "megatron-core": (0, 18), "nvidia-cudnn-cu12": (9, 12)}
    monkeypatch.setattr(precision, "_version", versions.get)
    monkeypatch.setattr(precision, "torch_cuda", lambda: (12, 9))
    return versions


def test_what_is_installed_is_read_from_packages(packages):
    assert precision.installed(here=True) == Surroundings(None, (12, 9), (2, 20, 2), (9, 12), (0, 18))
    packages["nvidia-cudnn-cu13"] = (9, 20)
    assert precision.installed(here=True).cudnn == (9, 20)
    packages.clear()
    assert precision.installed(here=True) == Surroundings(None, (12, 9), (), None, None)
    assert precision.installed(here=False).transformer_engine is None


def test_a_version_is_that_of_the_package(monkeypatch):
    assert precision._version("no-such-package") is None
    monkeypatch.setattr(precision.metadata, "version", {"a": "1.2rc3"}.__getitem__)
    assert precision._version("a") == (1, 2)


@pytest.mark.parametrize(
    ("recipe", "changes", "line"),
    [
        (
            *("blockwise", {"capability": 8.9}),
            "actor.fp8_recipe: got blockwise, but a GPU has compute capability 8.9, it needs 9.0 or newer; allowed: "
            "tensorwise; fix: set actor.fp8_recipe=tensorwise",
        ),
        (
            *("mxfp8", {}),
            "actor.fp8_recipe: got mxfp8, but a GPU has compute capability 9, it needs 10.0 or newer; allowed: "
            "tensorwise or blockwise; fix: set actor.fp8_recipe=blockwise",
        ),
        (
            *("tensorwise", {"transformer_engine": ()}),
            "actor.precision: got fp8 (tensorwise), but Transformer Engine is not installed; allowed: fp8 where it is; "
            "fix: install it (docs/gpu.md), or set actor.precision=bf16",
        ),
        (
            *("tensorwise", {"capability": 0.0, "transformer_engine": ()}),
            "actor.precision: got fp8 (tensorwise), but there is no GPU; allowed: fp32, bf16; fix: set "
            "actor.precision=bf16",
        ),
    ],
)
def test_a_recipe_that_does_not_run_is_said_with_what_does(recipe, changes, line):
    problem = precision.problem(recipe, replace(ALL, **changes))
    assert str(problem) == line and {problem.field, *problem.also} == {"actor.fp8_recipe", "actor.precision"}


@pytest.mark.parametrize(
    ("recipe", "least"),
    [
        ("tensorwise", Surroundings(8.9, (12, 1), (2, 2), (9, 12))),
        ("blockwise", Surroundings(9.0, (12, 9), (2, 3), (9, 12))),
        ("mxfp8", Surroundings(10.0, (12, 8), (2, 1), (9, 12))),
        ("mxfp8", Surroundings(11.9, (12, 8), (2, 1), (9, 12))),
    ],
)
def test_the_least_that_a_recipe_needs_is_enough_and_less_is_not(recipe, least):
    assert precision.why_not(recipe, least) == ""
    (cuda, minor), (engine, part) = least.cuda, least.transformer_engine
    less = [
        *(replace(least, cuda=(cuda, minor - 1)), replace(least, transformer_engine=(engine, part - 1))),
        *(replace(least, cudnn=(9, 11)), replace(least, capability=8.8)),
    ]
    assert all(precision.why_not(recipe, found) for found in less)
    assert "kernels (below 12.0)" in precision.why_not("mxfp8", replace(least, capability=12.0))


def test_padding_of_a_recipe_is_known():
    needs = {name: (one.width, one.tokens) for name, one in precision.NEEDS.items()}
    assert needs == {"tensorwise": (16, 32), "blockwise": (16, 128), "mxfp8": (32, 32)}


def shape(**fields):
    base = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 8}
    return read_model_shape({**base, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100, **fields})


def test_sides_of_a_ranks_matrices_are_those_of_its_part():
    assert _sides(ActorSection(tensor_parallel=2), shape()) == {
        "hidden columns": 64,
        "columns of attention heads": 32,
        "rows of queries, keys and values": (4 + 2 * 2) * 8,
        "MLP columns": 64,
    }
    experts = shape(**EXPERTS)
    found = _sides(ActorSection(tensor_parallel=8, expert_tensor_parallel=2), experts)
    assert found["rows of queries, keys and values"] == (1 + 2) * 8 and found["columns of an expert"] == 16
    assert "MLP columns" not in found and "MLP columns" in _sides(ActorSection(), shape(**EXPERTS, mlp_only_layers=[0]))


def test_what_a_recipe_cannot_multiply_names_matrix_and_layout():
    (problem,) = precision.shape_problems(
        ActorSection(precision="fp8", tensor_parallel=2), shape(intermediate_size=144)
    )
    assert problem.got == "fp8 (tensorwise), but a rank has 72 MLP columns"
    assert problem.also == ("actor.tensor_parallel", "model.path")


@pytest.mark.parametrize(
    ("start", "end", "pipeline", "fields"),
    [
        (4, 3, 1, []),
        (4, 4, 1, ["end"]),
        (2, 0, 4, []),
        (3, 0, 4, ["start"]),
        (0, 3, 4, ["end"]),
        (5, 3, 2, ["end", "start"]),
    ],
)
def test_layers_in_bf16_leave_some_for_fp8_and_are_on_one_stage(start, end, pipeline, fields):
    actor = ActorSection(
        precision="fp8", pipeline_parallel=pipeline, num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end
    )
    found = list(precision.shape_problems(actor, shape()))
    assert [problem.field for problem in found] == [f"actor.num_layers_at_{name}_in_bf16" for name in fields]
    also = ("actor.num_layers_at_start_in_bf16", "actor.pipeline_parallel", "model.path")
    assert all(problem.also == also for problem in found)
    most = 8 // pipeline
    assert all(problem.fix.endswith(f"={most}") for problem in found if "at most" in problem.allowed)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "fp32"}, "fp32"),
        ({"precision": "fp8"}, "fp8 (tensorwise, hybrid)"),
        (
            {"precision": "fp8", "fp8_format": "e4m3", "num_layers_at_end_in_bf16": 1},
            "fp8 (tensorwise, e4m3, first 0 and last 1 layers in bf16)",
        ),
        (
            {"precision": "fp8", "fp8_recipe": "mxfp8", "num_layers_at_start_in_bf16": 2},
            "fp8 (mxfp8, hybrid, first 2 and last 0 layers in bf16)",
        ),
    ],
)
def test_a_precision_is_said_in_a_few_words(options, text):
    assert precision_text(ActorSection(**options)) == text


def test_experts_in_fp8_rest_on_the_model():
    problem = precision.experts_problem(shape(**EXPERTS), replace(ALL, megatron=(0, 18)))
    assert (problem.field, problem.also) == ("actor.precision", ("model.path",))
    assert (
        problem.got
        == "fp8 of a model with experts, but Megatron-core 0.18 with Transformer Engine 2.20.2 cannot save them"
    )


def test_fp8_is_checked_with_the_gpus_of_the_run_and_the_packages_here(run_files, packages):
    gpus = Hardware("gpu", 2, capability=9.0)
    run_files.set_shape(**EXPERTS)
    found = report(run_files, "actor.precision=fp8", "actor.tensor_parallel=2", hardware=gpus)
    assert [problem.got for problem in found.problems] == [
        "fp8 of a model with experts, but Megatron-core 0.18 with Transformer Engine 2.20.2 cannot save them",
    ]
    packages.clear()
    (problem,) = report(run_files, "actor.precision=fp8", hardware=replace(gpus, count=1)).problems
    assert "Transformer Engine is not installed" in problem.got
    elsewhere = Hardware("gpu", 1, capability=9.0, place="there")
    assert report(run_files, "actor.precision=fp8", hardware=elsewhere).problems == ()
    assert report(run_files, "actor.precision=fp8", hardware=replace(elsewhere, capability=None)).problems == ()


@pytest.mark.parametrize(
    ("fields", "ranks", "bad"),
    [
        ({"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 2}, 1, None),
        (
            {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 2},
            2,
            "key/value heads x head_dim 64, intermediate_",
        ),
        ({"hidden_size": 256, "head_dim": 256, "num_key_value_heads": 1}, 4, "intermediate_size 32"),
        ({"hidden_size": 200, "head_dim": 128}, 1, "hidden_size 200"),
        ({"hidden_size": 256, "head_dim": 128, **EXPERTS, "moe_intermediate_size": 128}, 1, "x head_dim 32"),
        ({"hidden_size": 256, **EXPERTS, "head_dim": 128, "moe_intermediate_size": 100}, 1, "width of an expert 100"),
        ({"hidden_size": 256, **EXPERTS, "head_dim": 128, "moe_intermediate_size": 256}, 2, None),
        (
            {"hidden_size": 256, **EXPERTS, "head_dim": 128, "moe_intermediate_size": 128, "mlp_only_layers": [0]}
            | {"intermediate_size": 100},
            *(1, "intermediate_size 100"),
        ),
    ],
)
def test_blocks_need_widths_that_they_divide(fields, ranks, bad):
    found = list(_uneven(shape(**fields), ranks))
    assert len(found) == (bad is not None) and all(bad in problem.got for problem in found), found
    assert all(problem.got.endswith(f"on each of {ranks} ranks") for problem in found)
    assert all(problem.also == ("engine.sglang.tensor_parallel", "model.path") for problem in found)


def test_a_family_that_is_not_requantized_rests_on_the_model(run_files):
    run_files.set_shape(model_type="llama")
    arguments = "engine.sglang.arguments={quantization: fp8, load_format: flash_rl}"
    gpus = Hardware("gpu", 8, capability=8.9)
    found = [p for p in report(run_files, *SERVERS, arguments, hardware=gpus).problems if "type llama" in p.got]
    assert [(p.field, p.also) for p in found] == [("engine.sglang.arguments", ("model.path",))]


@pytest.mark.parametrize(
    ("changes", "spoken"),
    [
        (["engine.sglang.sync=disk"], False),
        (["engine.sglang.sync=distributed"], True),
        (["engine.kind=my:Own", "engine.sglang.python=null"], False),
        (["engine.sglang.python=null", 'engine.sglang.urls=["http://h:1"]'], False),
    ],
)
def test_memory_of_both_ends_is_a_matter_of_broadcasts(run_files, monkeypatch, changes, spoken):
    monkeypatch.setattr(os, "environ", {**os.environ, "NCCL_CUMEM_ENABLE": "0"})
    options = ["engine.sglang.env.NCCL_CUMEM_ENABLE='1'", "engine.sglang.arguments.enable_symm_mem=true"]
    gpus = Hardware("gpu", 8, capability=9.0)
    found = [
        p
        for p in report(run_files, *SERVERS, *options, *changes, hardware=gpus).problems
        if "NCCL_" in p.allowed + p.got
    ]
    assert [p.field for p in found] == ["engine.sglang.env", "engine.sglang.arguments"] * spoken
    if spoken:
        assert found[0].fix == "remove it, and set NCCL_CUMEM_ENABLE=1 in the environment of the job"


@pytest.mark.parametrize("package", ["wandb", "triton"])
def test_a_package_that_an_option_needs_must_be_there(run_files, monkeypatch, package):
    overrides = {"wandb": "observe.wandb.enabled=true", "triton": "actor.logprob_kernel=triton"}[package]
    find = check_training.importlib.util.find_spec
    monkeypatch.setattr(
        check_training.importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    (problem,) = report(run_files, overrides).problems
    assert problem.field == overrides.partition("=")[0] and f"without the package {package}" in problem.got
    monkeypatch.setattr(
        check_training.importlib.util, "find_spec", lambda name: "a spec" if name == package else find(name)
    )
    assert report(run_files, overrides).problems == ()


def test_options_of_megatron_without_it_are_only_looked_up(monkeypatch, tmp_path):
    assert list(megatron_options.option_problems({"anything": 1}, {})) == []
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "a"), str(tmp_path / "b")]})
    monkeypatch.setattr(megatron_options.importlib.util, "find_spec", lambda name: None)
    assert megatron_options.upstream_names() == {} and megatron_options._installed() is None
    monkeypatch.setattr(megatron_options.importlib.util, "find_spec", lambda name: spec)
    assert megatron_options._installed() is None
    core = tmp_path / "b" / "core"
    core.mkdir(parents=True)
    assert megatron_options._installed() == core and megatron_options.upstream_names() == {}
    classes = {"model_parallel_config": "ModelParallelConfig", "transformer/transformer_config": "TransformerConfig"}
    classes |= {"optimizer/optimizer_config": "OptimizerConfig"}
    classes |= {"distributed/distributed_data_parallel_config": "DistributedDataParallelConfig"}
    for number, (file, name) in enumerate(classes.items()):
        path = core / f"{file}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"'é'\nx: int\nclass Other:\n  y: int\nclass {name}:\n  f{number}: int = 1\n  g = 2\n  a.b: int\n", "utf-8"
        )
    names = {"transformer": frozenset({"f0", "f1"}), "optimizer": frozenset({"f2"}), "ddp": frozenset({"f3"})}
    assert megatron_options.upstream_names() == names
    path.write_text("class")
    assert megatron_options.upstream_names() == {}


def test_names_of_megatron_are_told_apart():
    known = {"transformer": frozenset({"bucket_size", "tomorrow", "fp4"}), "ddp": frozenset({"nccl_ub"})}
    given = {"bucket_size": 1, "bucket_sise": 2, "tomorrow": 3, "hidden_size": 4, "fp4": False, "mamba_x": 5, "lr": 6}
    found = {p.field.removeprefix("actor.megatron."): p for p in megatron_options.option_problems(given, known)}
    assert list(found) == ["tomorrow", "hidden_size", "mamba_x", "lr", "bucket_sise"]
    assert found["hidden_size"].fix == "remove it here, or set model.path to a model with such a hidden_size"
    assert (
        found["lr"].fix == "remove it here"
        and found["lr"].allowed == "nothing, it is set by actor.optimizer.learning_rate"
    )
    assert found["mamba_x"].allowed == "nothing: no model family here has Mamba layers"
    assert found["tomorrow"].got == "3, which the installed Megatron-core has"
    assert found["bucket_sise"].fix == "did you mean bucket_size?" and "the 2 names" in found["bucket_sise"].allowed
    assert [bool(megatron_options.why_refused("fp4", value)) for value in (None, False, True, "e2m1")] == [
        False
    ] * 2 + [True] * 2
