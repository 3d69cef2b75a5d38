"""What this machine stands for in a rehearsal: planned times, overrides, prompts and answers; and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from rehearsal_settings import config, setting_in

from megatron_daro.errors import ConfigError
from megatron_daro.types import Prompt
from megatron_daro.workshop.rehearse import setting
from megatron_daro.workshop.rehearse.setting import Asked, PlannedTimes


def test_the_planned_step_hides_generation_behind_training():
    times = PlannedTimes(10.0, 1.0, 4.0, 2.0)
    assert times.step(0) == 17.0 and times.step(1) == 10.0 and PlannedTimes(5.0, 1.0, 4.0, 2.0).step(2) == 7.0
    usual = Asked("r")  # type: ignore[arg-type]
    assert (usual.nodes, usual.gpus_per_node, usual.steps, usual.gpu, usual.pace) == (1, 8, 3, "h100-80g", 0.01)
    assert usual.mean_response is None and usual.overrides == ()


def test_this_machine_stands_for_the_cluster_by_overrides(tmp_path):
    trainer = {"updates_per_batch": 2, "run_dir": "y"}
    full = config(trainer=trainer, reward={"workers": 1}, actor={"optimizer": {"warmup_steps": 100}})
    place = setting_in(full=full)
    steps = 3 * place.updates
    assert place.updates == full.trainer.steps_per_batch
    changes = place.changes(tmp_path, ["http://a"])
    assert changes == [
        'engine.sglang.urls=["http://a"]', "engine.sglang.verify=false", "engine.sglang.sync=distributed",
        "engine.sglang.fp8_blocks=false", "actor.routing_replay=false", "reward.workers=1",
        f"trainer.run_dir={tmp_path}",
        f"trainer.steps={steps}", f"actor.optimizer.warmup_steps={steps}", f"trainer.save_every_steps={steps}",
        "trainer.eval_every_steps=0", "trainer.export_hf=false", "observe.progress=false", "observe.tensorboard=false",
    ]  # fmt: skip
    assert "reward.workers=2" in setting_in(full=config(reward={"workers": 9})).changes(tmp_path, [])
    assert place.layers == [[range(4)]] and place.bucket_bytes % 2**20 == 0
    own = config(engine={"kind": "sglang", "sglang": {"bucket_mib": 3, "env": {"A": "b"}}})
    assert setting_in(full=own).bucket_bytes == 3 * 2**20 and setting_in(full=own).left_out == [
        "without engine.sglang.env"
    ]


@pytest.mark.parametrize(
    ("verifier", "ending"),
    [("math", " \\boxed{7}"), ("integer", "\nAnswer: 7"), ("exact", "\n## 7"), ("a:B", "\n## 7")],
)
def test_an_answer_ends_as_the_verifier_reads_it(verifier, ending):
    assert setting._ending(config(reward={"verifier": verifier, "marker": "##"}), "7") == ending


def test_canned_answers_are_as_long_as_planned_and_half_are_right(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 1000, "model_type": "llama"}')

    class Tokenizer:
        all_special_ids = (2, 900, 950)

        def __len__(self):
            return 990

        def encode(self, text, *, add_special_tokens):
            assert not add_special_tokens
            return [int(c) for c in text if c.isdigit()]

    full = config(model={"path": str(tmp_path)}, rollout={"rollouts_per_prompt": 4}, actor={"precision": "bf16"})
    workload = SimpleNamespace(response_Q=np.array([4.0, 200.0]))
    inputs = SimpleNamespace(tokenizer=Tokenizer(), stops=SimpleNamespace(token_ids=(5, 6)))
    found = setting_in(full=full, workload=workload).answers(inputs)
    assert found.ordinary == (450, 900) and found.endings == [[7, 5], [8, 5]] and found.delay_s == 5.0
    assert (found.vocabulary, found.model_type, found.device) == (1000, "llama", "cuda")
    assert found.dtype == full.actor.torch_dtype and found.tensor_parallel == full.engine.sglang.tensor_parallel
    assert [len(body) for body in found.lengths] == [4] * 8 and {n for body in found.lengths for n in body} == {16, 200}
    slow = setting_in(full=full, workload=workload, times=PlannedTimes(4000.0, 1.0, 1.0, 1.0)).answers(inputs)
    assert slow.delay_s == 1800.0


def test_prompts_are_the_recipes_with_an_answer_that_servers_know():
    seen: list[object] = []
    source = SimpleNamespace(
        next=lambda n: [Prompt("p", "3", "s", text="x", alternatives=("4",))] * n,
        observe=seen.append, state_dict=lambda: {"at": 1}, load_state_dict=seen.append,
    )  # fmt: skip
    prompts = setting._OneAnswer(source)
    assert [(one.id, one.answers) for one in prompts.next(2)] == [("p", ("7",))] * 2
    prompts.observe(["g"])
    prompts.load_state_dict({"at": 2})
    assert seen == [["g"], {"at": 2}] and prompts.state_dict() == {"at": 1}


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "embedded"}, "engine.kind: got 'embedded'; allowed in a rehearsal: 'sglang'"),
        ({"kind": "sglang", "sglang": {"urls": ["http://127.0.0.1:1"]}}, r"engine.sglang.urls: got servers that run"),
        ({"kind": "sglang", "colocate": True}, "engine.colocate: got true; allowed in a rehearsal: false"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(monkeypatch, engine, said):
    given: list[object] = []

    def resolve(recipe, overrides):
        given.append((recipe, overrides))
        return config(engine=engine), None

    monkeypatch.setattr(setting, "resolve_and_check", resolve)
    with pytest.raises(ConfigError, match=said):
        setting.setting_of(Asked("r", ("a=b",), nodes=4, gpus_per_node=2))  # type: ignore[arg-type]
    assert given == [("r", ["a=b", "cluster.nodes=4", "cluster.gpus_per_node=2"])]


def test_a_layout_is_said_in_words():
    actor = {"tensor_parallel": 2, "data_parallel": 3}
    assert setting.world(config(actor=actor)) == "6 ranks (TP 2, PP 1, CP 1, DP 3, EP 1)"
    virtual = config(actor={"pipeline_parallel": 2, "virtual_pipeline_parallel": 4})
    assert setting.world(virtual) == "2 ranks (TP 1, PP 2 in 4 parts each, CP 1, DP 1, EP 1)"
