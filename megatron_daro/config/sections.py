"""The typed sections of the configuration, and `Config`, which holds one of each.

Loading builds one Config. The loop's parts get their section of it (runtime/parts.py), what runs in processes of its
own the whole (`RunContext`). Refuses unknown keys and later writes. What spans several fields is in rules/.
"""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.base import OUT_OF_RANGE, ExpandedPath, OneOf, Section, Seed, Servers, Temperature, filled
from megatron_daro.config.lora import LoraSection
from megatron_daro.config.transports import TRANSPORTS, SGLangTransport, Transport

DataFormat = Literal["auto", "jsonl", "parquet", "gsm8k", "dapo"]
FieldName = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]


def _with_one_problem(template: str) -> str:
    if template.count("{prompt}") != 1:
        raise PydanticCustomError(OUT_OF_RANGE, "a text with {one} once, where the problem goes", {"one": "{prompt}"})
    return template


def _ordered(rates: tuple[float, float]) -> tuple[float, float]:
    if rates[0] > rates[1]:
        raise PydanticCustomError(OUT_OF_RANGE, "a list of 2, the lower one first")
    return rates


class ModelSection(Section):
    """The model to train."""

    path: ExpandedPath
    """Local Hugging Face directory: config.json, *.safetensors, tokenizer files."""
    megatron_weights: ExpandedPath | None = None
    """Megatron checkpoint (of `megatron-daro convert`, of a run, or Megatron-LM's torch_dist) to start from. Unset:
    the weights in path."""
    trust_remote_code: bool = False
    """Allow Python code in the model's directory to run."""


EvalTemplate = Literal["data", "chat", "qwen-math", "r1", "none"]
"""How an evaluation writes its problems."""


class EvalSet(Section):
    """One held-out set of problems."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    """Name in metrics (eval/{name}/accuracy)."""
    path: ExpandedPath
    """File of problems."""
    format: DataFormat = "auto"
    """As data.format."""
    problem_field: FieldName | None = None
    """As data.problem_field."""
    answer_field: FieldName | None = None
    """As data.answer_field."""
    rollouts_per_prompt: int = Field(default=1, ge=1, le=65536)
    """Answers per problem."""
    temperature: Temperature = Field(default=0.0, ge=0, le=100)
    """0: greedy, else at least 0.001."""
    top_p: float = Field(default=1.0, ge=1e-6, le=1)
    """1: off."""
    template: EvalTemplate = "data"
    """data: as the training data (data.prompt_template, data.template); the others: templates of papers
    (docs/evaluate.md has their texts)."""
    rows: int | None = Field(default=None, ge=1)
    """Rows that the file must have."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Only the first so many problems."""
    drop_unusable: bool = False
    """Leave out rows without problem or answer and prompts that are too long. Off: such a row is an error, since
    the accuracy would be that of another set."""


class CurriculumSection(Section):
    """Easy to hard, by the pass rates that the files store."""

    start: float = Field(default=0.2, ge=1e-6, le=1)
    """Share of the problems, easiest first, that is open at the start."""
    ramp_prompts: int | None = Field(default=None, ge=1)
    """Prompts drawn until all problems are open. Unset: half of those of the steps that the run began with."""


class PrioritisedSection(Section):
    """More of what the run fails on."""

    by: Literal["failure", "signal", "gaussian"] = "failure"
    """failure: by the recent failure rate f; signal: by 4 f (1 - f), so that hopeless problems come as seldom as
    solved ones; gaussian: by exp(-((f - 0.5) / 0.1)^2 / 2). With each visit of a problem, what was known of it before
    counts half."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """Priority of a problem that is always solved, relative to 1. 0 (Kimi k1.5's): it comes when all others of a
    batch were drawn."""


class DataSection(Section):
    """Prompts and how they are written for the model."""

    train: Annotated[tuple[ExpandedPath, ...], Field(min_length=1)]
    """Files of training problems."""
    format: DataFormat = "auto"
    """Layout of the training files; auto: recognised by their content."""
    problem_field: FieldName | None = None
    """Field of the problem. Unset: as the format has it."""
    answer_field: FieldName | None = None
    """Field of the answer. Unset: as the format has it."""
    prompt_template: Literal["chat", "plain", "qwen-math", "r1", "none"] = "chat"
    """chat: the tokenizer's chat template around the text; plain: the text alone; the others: templates of papers, in
    the place of the text (docs/evaluate.md has them). r1 ends answers at </answer> and verifies what its tags hold."""
    template: Annotated[str, Field(pattern=r"\{prompt\}"), AfterValidator(_with_one_problem)] = "{prompt}"
    """Text of the prompt (with chat: of the user's message); {prompt} is the problem."""
    template_date: datetime.date | None = None
    """What a chat template takes for today (strftime_now), as 2026-07-31. Unset: the day on which the run began."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Tokens; longer prompts are dropped and counted."""
    pass_rates: Annotated[tuple[Share, Share], AfterValidator(_ordered)] | None = None
    """Only problems whose stored pass rate lies between these two, both inside; one without is an error. Unset: all."""
    shuffle: bool = True
    """Shuffle anew for each pass over the problems, from trainer.seed."""
    order: Literal["epochs", "curriculum", "prioritised"] = "epochs"
    """epochs: one pass over the problems after the other; curriculum: easy to hard, by stored pass rates; prioritised:
    by recent failure in this run, at first by stored pass rates."""
    curriculum: CurriculumSection = CurriculumSection()
    """Options of order curriculum."""
    prioritised: PrioritisedSection = PrioritisedSection()
    """Options of order prioritised."""
    eval: tuple[EvalSet, ...] = ()
    """Held-out sets."""


_LONGEST_BLOCK = 64
"""Tokens of what repeats itself in an answer."""


class RepetitionSection(Section):
    """Answers that repeat themselves end there, with finish reason `repetition`."""

    tokens: int | None = Field(default=None, ge=8)
    """An answer ends once its last so many tokens are one block over and over, of at most 64 tokens and at most half as
    many. Unset: off."""

    @property
    def looked_for(self) -> tuple[int, int] | None:
        """Tokens that repeat, and most of the block; None where it is off."""
        return None if self.tokens is None else (self.tokens, min(_LONGEST_BLOCK, self.tokens // 2))


FinishBatch = Literal["all", "enough"]
"""What a batch waits for: see `RolloutSection.finish_batch`."""


class RolloutSection(Section):
    """How much is sampled, and how."""

    prompts_per_batch: int = Field(default=64, ge=1, le=65536)
    """Prompts (groups) of a batch."""
    rollouts_per_prompt: int = Field(default=8, ge=2, le=65536)
    """Rollouts per prompt (K)."""
    temperature: Temperature = Field(default=1.0, ge=0, le=100)
    """Sampling temperature; at least 0.001 for training."""
    top_p: float = Field(default=1.0, ge=1e-6, le=1)
    """Nucleus sampling; 1: off."""
    max_response_tokens: int = Field(default=4096, ge=1)
    """Longest answer, tokens."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer, within a token or over several. The model's end token always counts."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Token ids that end an answer."""
    max_staleness: int = Field(default=0, ge=0, le=1024)
    """Most batches that an answer's weights may be behind the policy that trains on it; 0: synchronous. Generation
    runs ahead by as many batches, less those for which groups are kept (keep_surplus, segment_tokens)."""
    oversampling: float = Field(default=1.0, ge=1, le=100)
    """Prompts that are begun, as a multiple of those that the batch is likely to need."""
    max_refill_rounds: int = Field(default=3, ge=0, le=1000)
    """Further rounds of prompts while the batch is not full; then the smaller batch is trained."""
    keep_surplus: bool = False
    """Keep groups beyond the batch for the next one, and unfinished ones, single answers with their tokens so far.
    Needs max_staleness >= 1."""
    finish_batch: Literal["auto", FinishBatch] = "auto"
    """all: each round waits for all of its groups, so a run repeats exactly if the engine's answers do; enough: a batch
    ends once prompts_per_batch groups are trainable; auto: all with an engine that works on one batch at a time
    (embedded), else enough."""

    segment_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that one answer gets while one batch is sampled (again where none of its groups ended); then it is
    set aside, and goes on with the next (Kimi k1.5's partial rollouts). Keeps surplus groups as well. Unset: no limit
    but max_response_tokens."""
    repetition: RepetitionSection = RepetitionSection()
    """A stop for answers that repeat themselves."""

    @property
    def segments(self) -> int:
        """Batches that the longest answer is sampled over."""
        return math.ceil(self.max_response_tokens / (self.segment_tokens or self.max_response_tokens))

    @property
    def keeps_waiting(self) -> bool:
        """Whether surplus and unfinished groups go on with the next batch."""
        return self.keep_surplus or self.segment_tokens is not None

    @property
    def batches_kept(self) -> int:
        """Batches that a group may go on for after the one it began in: its segments, then one as surplus."""
        return self.segments if self.segment_tokens is not None else int(self.keep_surplus)

    @property
    def batch_rollouts(self) -> int:
        """Samples of one training batch: prompts_per_batch * rollouts_per_prompt."""
        return self.prompts_per_batch * self.rollouts_per_prompt

    @property
    def prompts_requested(self) -> int:
        """Prompts of a round: what a batch begins with where the filter keeps all."""
        return math.ceil(self.prompts_per_batch * self.oversampling)

    @property
    def batches_ahead(self) -> int:
        """Batches by which generation runs ahead: what is kept for the next one must not be too old for it."""
        return max(self.max_staleness - self.batches_kept, 0)

    def finish_batch_with(self, *, one_batch_at_a_time: bool) -> FinishBatch:
        """`finish_batch`, with auto resolved for an engine that works on one batch at a time, or not."""
        if self.finish_batch != "auto":
            return self.finish_batch
        return "all" if one_batch_at_a_time else "enough"


class EmbeddedSection(Section):
    """The engine that runs in a process of the job."""

    batch_size: int = Field(default=64, ge=1, le=65536)
    """Rows generated together."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per replica. Unset: torch's default."""
    max_restarts: int = Field(default=20, ge=0)
    """Restarts of each replica whose process died."""


CPU_BUCKET_MIB, GPU_BUCKET_MIB = 64, 256
"""engine.sglang.bucket_mib where it is unset, by what the servers run on."""
SHARED_FRACTION = 0.6
"""mem_fraction_static of servers that take turns with ranks, where it is unset: for weights and cache."""


class SGLangSection(Section):
    """SGLang servers: how they are started, fed, kept in step with the policy, and given up."""

    python: ExpandedPath | None = None
    """Python interpreter that has sglang. Unset: the trainer's."""
    urls: Servers = ()
    """Running servers, as http://host:port; then none is started."""
    arguments: dict[str, Any] = {}
    """Server arguments under their upstream names, such as mem_fraction_static."""
    env: dict[str, str] = {}
    """Environment variables of the servers."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs (on a CPU: ranks) per server."""
    nodes: int = Field(default=1, ge=1)
    """Parts that each server is spread over, each on one node with an equal part of its GPUs."""
    sync: SGLangTransport = "distributed"
    """How weights reach the servers. distributed: broadcast (NCCL, or gloo on CPU); shards: each rank sends its own to
    those that need them (SGLang 0.5.23); disk: files in sync_dir, which trainer and servers both see; tensor: CUDA
    IPC from a rank on the server's host; adapters: those of section lora alone. Not given: adapters where there are any
    and servers can take them (docs/lora.md)."""
    shards_over: Literal["tcp", "rdma", "mooncake_tcp"] = "tcp"
    """What carries the bytes of sync shards. tcp: through host memory; rdma: Mooncake's transfer engine, from GPU to
    GPU (mooncake-transfer-engine in both environments); mooncake_tcp: the same without its hardware, to try it."""
    fp8_blocks: bool = False
    """Send the layers' matrices as fp8 blocks of 128 x 128 (compute capability 8.9 or 9.0, SGLang 0.5.23)."""
    sync_dir: ExpandedPath | None = None
    """Directory of sync disk; each run has a folder of its own in it. Unset: RUN/sync."""
    bucket_mib: int | None = Field(default=None, ge=1, le=65536)
    """Size of a weight bucket, MiB; the sender holds two. Unset: 64 to servers on a CPU, else 256."""
    verify: bool = True
    """Compare log-probs and checksums after each update."""
    answer_workers: int | None = Field(default=None, ge=1, le=4096)
    """Processes that send requests, parse responses and decode tokens. Unset: one per Ray node."""
    max_tokens_in_flight: int | None = Field(default=None, ge=1)
    """Tokens given to one server at once. Unset: twice its cache."""
    start_timeout_s: float = Field(default=1800.0, ge=0.01, le=1e6)
    """Until a server generates its first token, seconds."""
    request_timeout_s: float = Field(default=3600.0, ge=0.01, le=1e6)
    """Until the answers of one group arrive, seconds; then it is requested elsewhere."""
    stall_timeout_s: float = Field(default=60.0, ge=0.01, le=1e6)
    """Without any progress; then the server is fenced. Seconds."""
    sync_timeout_s: float = Field(default=300.0, ge=0.01, le=1e6)
    """For each call of a weight update and each broadcast, seconds."""
    max_restarts: int = Field(default=20, ge=0)
    """Restarts of each failed server."""

    @property
    def named_arguments(self) -> dict[str, Any]:
        """`arguments`, however they were spelled, with underscores in their names."""
        return {name.replace("-", "_"): value for name, value in self.arguments.items()}

    @property
    def is_quantized(self) -> bool:
        """Whether servers are quantized."""
        return self.fp8_blocks or self.named_arguments.get("quantization") is not None

    @property
    def transport(self) -> Transport:
        """What is known of `sync`."""
        return TRANSPORTS[self.sync]


class EngineSection(Section):
    """The rollout engine."""

    kind: Annotated[str, OneOf(("embedded", "sglang"))] = "embedded"
    """embedded: transformers in a process of the job; sglang: SGLang servers; module:Class: an engine of your own."""
    options: dict[str, Any] = {}
    """Options of an engine of your own: keyword arguments of its constructor."""
    replicas: int = Field(default=1, ge=1, le=65536)
    """Servers, or processes of the embedded engine, that share the prompts."""
    seed: Seed | None = None
    """Seed of sampling. Unset: trainer.seed."""
    colocate: bool = False
    """Servers and ranks share GPUs and offload in alternation. Off: each has GPUs of its own."""
    embedded: EmbeddedSection = EmbeddedSection()
    """Options of the embedded engine."""
    sglang: SGLangSection = SGLangSection()
    """Options of SGLang servers."""

    @property
    def is_own(self) -> bool:
        """Whether `kind` is module:Class."""
        return ":" in self.kind

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the constructor of an engine of one's own, beside model_path."""
        return {"replicas": self.replicas, "seed": filled(self.seed), **self.options}


class RewardSection(Section):
    """The verifier and its worker processes."""

    verifier: Annotated[str, OneOf(("math", "integer", "exact"))] = "math"
    """math: math-verify on the last boxed answer; integer: DAPO's last `Answer:` line; exact: equal text;
    module:Class: a verifier of your own."""
    options: dict[str, Any] = {}
    """Options of this verifier, which judges them; of your own: keyword arguments of its constructor."""
    workers: int = Field(default=2, ge=1, le=65536)
    """Worker processes in total, at least one per Ray node."""
    timeout_s: float = Field(default=5.0, ge=0.01, le=1e5)
    """Time limit per answer, seconds; then the worker is killed and replaced."""
    memory_mib: int = Field(default=1024, ge=64, le=2**20)
    """Resident memory of one worker and all that it starts, MiB."""
    correct_reward: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Reward of a correct answer; above incorrect_reward."""
    incorrect_reward: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Reward of a wrong answer (DAPO uses -1)."""

    @property
    def is_own(self) -> bool:
        """Whether `verifier` is module:Class."""
        return ":" in self.verifier


LOOPBACK = "127.0.0.1"


class EnvironmentSection(Section):
    """What happens between a prompt and its verdict."""

    kind: Annotated[str, OneOf(("single_turn", "agent"), "verifiers", own="module:Class or function")] = "single_turn"
    """single_turn: one answer, scored by reward.verifier; agent: a program that speaks OpenAI's API; module:function:
    a coroutine that does; verifiers:TASKSET: tasks of the package verifiers; module:Class: an environment of your own,
    with several turns."""
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Program and arguments of kind agent, run once for each rollout."""
    sandbox: bool = False
    """Run it where it reaches the endpoint and nothing else, and writes to a folder of its own."""
    options: dict[str, Any] = {}
    """Options of an environment of your own: keyword arguments of its constructor or coroutine; of kind agent: a part
    of the problem that it reads; of kind verifiers: its configuration beside the taskset's name."""
    timeout_s: float = Field(default=300.0, ge=0.01, le=1e6)
    """Time limit of a conversation, seconds, in which engine, verifier and workers of `step` do not count; then it is
    restarted."""
    workers: int = Field(default=2, ge=1, le=65536)
    """Worker processes of an environment with `step`, in all; each node has at least one. Of programs and
    kind verifiers: rollouts at once, on the driver's machine."""
    step_timeout_s: float = Field(default=30.0, ge=0.01, le=1e6)
    """Time limit of one `reset` or `step`, seconds; then its worker is ended and the conversation restarted."""
    memory_mib: int = Field(default=1024, ge=64, le=2**20)
    """Resident memory of one worker and all that it starts, MiB."""
    max_turns: int = Field(default=16, ge=1, le=10000)
    """Most answers of the model in a conversation with `step`."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one of its answers. Unset: what rollout.max_response_tokens leaves."""
    reward_weights: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = {}
    """Factors of rewards that have names, by name; then each name needs one. Empty: each counts once."""
    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]+$")] = LOOPBACK
    """Address of this machine on which an agent's endpoint listens and is reached; on another than loopback nothing is
    said without a key."""
    strict: bool = False
    """End the run where a conversation with `step` differs from its history as the chat template renders it."""

    @property
    def has_turns(self) -> bool:
        """Whether rollouts are conversations: `kind` is another than single_turn."""
        return self.kind != "single_turn"

    @property
    def of_verifiers(self) -> bool:
        """Whether `kind` is verifiers:TASKSET."""
        return self.kind.startswith("verifiers:")

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return f"environment.kind: {self.kind}"


class NamedEnvironment(EnvironmentSection):
    """One of several environments of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]{0,63}$")]
    """Its name, in metrics."""
    sources: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Data sources of its problems. Empty: the one that is called as it is."""
    weight: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Its share of the training prompts is this over the sum of all weights. Unset, for all: its share of the
    problems."""

    @property
    def title(self) -> str:
        """What it is called in messages, of several."""
        return f"environments: {self.name}, kind {self.kind}"


class TrainerSection(Section):
    """The run."""

    run_dir: ExpandedPath | None = None
    """Run directory. Unset: runs/ and the configuration file's name without its ending."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps; each batch gives minibatches_per_batch * epochs_per_batch of them."""
    seed: Seed = 0
    """Seed of everything random."""
    save_every_steps: int = Field(default=20, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Keep for good the first checkpoint at or after each multiple of this many steps; 0: none."""
    export_hf: bool = False
    """After the last step write the model to RUN/hf (bf16 or fp32). With --resume also for a finished run."""
    export_critic: bool = False
    """The same for the critic: RUN/hf_critic, a sequence classifier with one label for transformers."""
    export_adapter: bool = False
    """The same for the adapters (section lora): RUN/adapter, for PEFT, vLLM and SGLang."""
    eval_every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations on data.eval, also before the first and after the last; 0: never. A stop ends one or
    leaves it out, and says so."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """NaN or infinity in loss or gradient. stop: exit code 3; skip: count the step."""
    deadline_scale: float = Field(default=1.0, ge=1e-3, le=1000)
    """Factor of every deadline in the loop (optimizer step 4 h, collective of the ranks 30 min, ...). They grow with
    the limits of servers, environments and verifiers."""
    minibatches_per_batch: int = Field(default=1, ge=1)
    """Mini-batches of whole groups that a batch is split into, as even as can be; an optimizer step each."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """How often a batch is trained on; after the first time its mini-batches are drawn anew, from trainer.seed."""
    replace_lost_ranks: bool = False
    """Replace a rank whose process dies, and go on from a snapshot in host memory, taken after each step
    (docs/recovery.md). Off: the run ends; --resume goes on from a checkpoint."""
    snapshot_gib: float | None = Field(default=None, ge=0, le=1e6)
    """Host memory of each node for these snapshots, GiB. Unset: half of what is free once the ranks have their
    model."""
    max_replacements: int = Field(default=8, ge=0, le=100_000)
    """Ranks that are replaced within an hour; one more ends the run."""
    hung_rank_s: float = Field(default=120.0, ge=1, le=86_400)
    """Seconds after which an embedded engine whose process neither answers, not even that it lives, nor uses the CPU is
    killed and started again; with replace_lost_ranks also a rank, which is then replaced."""

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of a batch."""
        return self.minibatches_per_batch * self.epochs_per_batch

    @property
    def hf_dir(self) -> Path:
        """Where the trained model goes if it is exported."""
        return filled(self.run_dir) / "hf"

    @property
    def critic_dir(self) -> Path:
        """Where the trained critic goes if it is exported."""
        return filled(self.run_dir) / "hf_critic"

    @property
    def adapter_dir(self) -> Path:
        """Where the trained adapters go if they are exported."""
        return filled(self.run_dir) / "adapter"


class ClusterSection(Section):
    """The nodes that the run will get, for checks on a machine that is not one of them; a start asks Ray itself."""

    nodes: int = Field(default=1, ge=1)
    """Nodes."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs per node. Unset: of the Ray cluster or this machine."""
    gpu: Annotated[str, Field(min_length=1)] | None = None
    """Type as Ray names it, such as H100."""


class WandbSection(Section):
    """Weights & Biases."""

    enabled: bool = False
    """Send metrics to Weights & Biases (needs the extra `wandb`)."""
    project: Annotated[str, Field(min_length=1)] = "megatron-daro"
    """Project name."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run. Unset: the name of the run directory."""


class ObserveSection(Section):
    """What is shown and written."""

    progress: bool = True
    """Show progress on the terminal."""
    tensorboard: bool = True
    """Write TensorBoard events to RUN/tensorboard."""
    save_rollouts: bool = True
    """Write RUN/rollouts (needed for replay and samples in the report)."""
    wandb: WandbSection = WandbSection()
    """Weights & Biases."""


class Config(Section):
    """The whole configuration."""

    model: ModelSection
    """The model to train."""
    data: DataSection
    """Prompts."""
    rollout: RolloutSection = RolloutSection()
    """Sampling."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """The loss."""
    actor: ActorSection = ActorSection()
    """The policy under training."""
    lora: LoraSection = LoraSection()
    """Adapters in place of all weights."""
    engine: EngineSection = EngineSection()
    """The rollout engine."""
    environment: EnvironmentSection = EnvironmentSection()
    """What happens between a prompt and its verdict."""
    environments: tuple[NamedEnvironment, ...] = ()
    """Several environments, each for the problems of its data sources, in place of `environment`."""
    reward: RewardSection = RewardSection()
    """The verifier."""
    trainer: TrainerSection = TrainerSection()
    """The run."""
    cluster: ClusterSection = ClusterSection()
    """The nodes that the run will get."""
    observe: ObserveSection = ObserveSection()
    """What is shown and written."""

    @property
    def all_environments(self) -> tuple[EnvironmentSection, ...]:
        """`environments`, or the one that the run has."""
        return self.environments or (self.environment,)

    @property
    def environment_of_source(self) -> dict[str, str]:
        """Data source -> name of its environment; empty where the run has one."""
        return {source: one.name for one in self.environments for source in one.sources or (one.name,)}
