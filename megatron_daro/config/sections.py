"""The typed sections of the configuration, and `Config`, which holds one of each.

Loading builds one Config. The loop's parts get only their section of it (runtime/parts.py); what starts processes gets
all of it (`RunContext`). Unknown keys and later writes are refused. Checks that span several fields are in rules/.
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
    """Megatron checkpoint to start from (from `megatron-daro convert`, a run, or Megatron-LM in torch_dist format).
    Unset: the weights in path."""
    trust_remote_code: bool = False
    """Allow Python code in the model's directory to run."""


EvalTemplate = Literal["data", "chat", "qwen-math", "r1", "none"]
"""How an evaluation writes its problems as prompts."""


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
    """data: as for training (data.prompt_template, data.template); the others: templates from papers
    (docs/evaluate.md has their texts)."""
    rows: int | None = Field(default=None, ge=1)
    """Number of rows that the file must have. Unset: any."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Use only this many problems, the first ones. Unset: all."""
    drop_unusable: bool = False
    """Leave out rows without a problem or an answer, and prompts that are too long. Off: such a row is an error, since
    the accuracy would be measured on another set."""


class CurriculumSection(Section):
    """Easy to hard, by the pass rates stored in the training files."""

    start: float = Field(default=0.2, ge=1e-6, le=1)
    """Share of the problems, the easiest ones, that can be drawn at the start."""
    ramp_prompts: int | None = Field(default=None, ge=1)
    """Number of prompts drawn until all problems can be drawn. Unset: half of the prompts that trainer.steps needs; the
    number is fixed when the run first starts."""


class PrioritisedSection(Section):
    """Draw more often the problems on which the run fails."""

    by: Literal["failure", "signal", "gaussian"] = "failure"
    """What the priority of a problem follows. failure: its recent failure rate f; signal: 4 f (1 - f), so that hopeless
    problems come as seldom as solved ones; gaussian: exp(-((f - 0.5) / 0.1)^2 / 2). Each time a problem is sampled, f
    becomes the mean of the old f and the new failure rate."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """Lowest priority of a problem; the highest is 1. With 0 (as in Kimi k1.5) a problem whose priority is 0 comes
    only when all others have been drawn for the batch."""


class DataSection(Section):
    """Prompts, and how they are written for the model."""

    train: Annotated[tuple[ExpandedPath, ...], Field(min_length=1)]
    """Files of training problems."""
    format: DataFormat = "auto"
    """Layout of the training files; auto: recognised by their content."""
    problem_field: FieldName | None = None
    """Name of the field that holds the problem. Unset: the format's."""
    answer_field: FieldName | None = None
    """Name of the field that holds the answer. Unset: the format's."""
    prompt_template: Literal["chat", "plain", "qwen-math", "r1", "none"] = "chat"
    """chat: the tokenizer's chat template around `template`; plain: `template` alone; the others: templates from
    papers, in place of `template` (docs/evaluate.md has them). r1 ends answers at </answer> and verifies what stands
    between its tags."""
    template: Annotated[str, Field(pattern=r"\{prompt\}"), AfterValidator(_with_one_problem)] = "{prompt}"
    """Text of the prompt (with chat: of the user's message); {prompt} is replaced by the problem."""
    template_date: datetime.date | None = None
    """The date that a chat template takes for today (strftime_now). Unset: the day on which the run began."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, in tokens; longer ones are dropped and counted."""
    pass_rates: Annotated[tuple[Share, Share], AfterValidator(_ordered)] | None = None
    """Train only on problems whose stored pass rate lies between these two numbers, both included; a problem without a
    stored rate is an error. Unset: all problems."""
    shuffle: bool = True
    """With order epochs: shuffle the problems anew for each pass over them, from trainer.seed."""
    order: Literal["epochs", "curriculum", "prioritised"] = "epochs"
    """epochs: one pass over the problems after another; curriculum: easy to hard, by stored pass rates; prioritised:
    by recent failures in this run (for a problem that was not tried yet, by its stored pass rate)."""
    curriculum: CurriculumSection = CurriculumSection()
    """Options of order curriculum."""
    prioritised: PrioritisedSection = PrioritisedSection()
    """Options of order prioritised."""
    eval: tuple[EvalSet, ...] = ()
    """Held-out sets."""


_LONGEST_BLOCK = 64
"""Most tokens of the block that repeats in an answer."""


class RepetitionSection(Section):
    """End answers that repeat themselves, with finish reason `repetition`."""

    tokens: int | None = Field(default=None, ge=8)
    """An answer is ended once its last `tokens` tokens are one block repeated over and over; the block has at most 64
    tokens, and at most half of `tokens`. Unset: off."""

    @property
    def looked_for(self) -> tuple[int, int] | None:
        """(tokens that must consist of repeats, longest block in tokens); None if the check is off."""
        return None if self.tokens is None else (self.tokens, min(_LONGEST_BLOCK, self.tokens // 2))


FinishBatch = Literal["all", "enough"]
"""When a batch ends: see `RolloutSection.finish_batch`."""


class RolloutSection(Section):
    """How much is sampled, and how."""

    prompts_per_batch: int = Field(default=64, ge=1, le=65536)
    """Prompts (groups) per batch."""
    rollouts_per_prompt: int = Field(default=8, ge=2, le=65536)
    """Rollouts per prompt (K)."""
    temperature: Temperature = Field(default=1.0, ge=0, le=100)
    """Sampling temperature; training needs at least 0.001."""
    top_p: float = Field(default=1.0, ge=1e-6, le=1)
    """Nucleus sampling; 1: off."""
    max_response_tokens: int = Field(default=4096, ge=1)
    """Longest answer, tokens."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer, whether inside one token or across several. The model's end token always ends it."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Token ids that end an answer."""
    max_staleness: int = Field(default=0, ge=0, le=1024)
    """By how many batches the weights that sampled an answer may be behind the policy that trains on it; 0:
    synchronous. Generation runs ahead by this many batches, less the batches for which groups are kept (1 with
    keep_surplus; with segment_tokens as many as the longest answer has segments)."""
    oversampling: float = Field(default=1.0, ge=1, le=100)
    """Prompts to begin, as a multiple of those that the batch is likely to need."""
    max_refill_rounds: int = Field(default=3, ge=0, le=1000)
    """Most further rounds of prompts while the batch is not full; after these the smaller batch is trained. With
    segment_tokens: each time that answers get a segment."""
    keep_surplus: bool = False
    """Keep what a batch leaves over for the next one: complete groups beyond prompts_per_batch, and unfinished groups
    (single answers with their tokens so far). Needs max_staleness >= 1."""
    finish_batch: Literal["auto", FinishBatch] = "auto"
    """all: a batch waits for all groups that were begun, so a run repeats exactly if the engine's answers do and
    generation runs at most one batch ahead; enough: a batch ends once prompts_per_batch groups are trainable; auto: all
    with an engine that works on one batch at a time (embedded), else enough."""

    segment_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that an answer gets per batch; a longer answer is set aside and goes on in the next batch (Kimi
    k1.5's partial rollouts). If the batch has no group to train by then, its answers get as many again, beside as many
    new prompts. Surplus groups are kept as with keep_surplus. With finish_batch enough a batch may also end within a
    segment; so a long answer may take more batches than it has segments, and its group be dropped as too old. Unset:
    only max_response_tokens limits an answer."""
    repetition: RepetitionSection = RepetitionSection()
    """Options for ending answers that repeat themselves."""

    @property
    def segments(self) -> int:
        """Number of segments of the longest answer."""
        return math.ceil(self.max_response_tokens / (self.segment_tokens or self.max_response_tokens))

    @property
    def keeps_waiting(self) -> bool:
        """Whether surplus and unfinished groups are kept for the next batch."""
        return self.keep_surplus or self.segment_tokens is not None

    @property
    def batches_kept(self) -> int:
        """For how many batches after the one in which it began a group may be kept: with segments until the last one
        has ended, if no batch ends within one, and one more as surplus."""
        return self.segments if self.segment_tokens is not None else int(self.keep_surplus)

    @property
    def batch_rollouts(self) -> int:
        """Samples of one training batch: prompts_per_batch * rollouts_per_prompt."""
        return self.prompts_per_batch * self.rollouts_per_prompt

    @property
    def prompts_requested(self) -> int:
        """Prompts per round: those that a batch begins with if the filter keeps every group."""
        return math.ceil(self.prompts_per_batch * self.oversampling)

    @property
    def batches_ahead(self) -> int:
        """By how many batches generation runs ahead: few enough for groups that are kept for `batches_kept` batches."""
        return max(self.max_staleness - self.batches_kept, 0)

    def finish_batch_with(self, *, one_batch_at_a_time: bool) -> FinishBatch:
        """Return `finish_batch`, with auto resolved by whether the engine works on one batch at a time."""
        if self.finish_batch != "auto":
            return self.finish_batch
        return "all" if one_batch_at_a_time else "enough"


class EmbeddedSection(Section):
    """The engine that runs in processes of the job."""

    batch_size: int = Field(default=64, ge=1, le=65536)
    """Answers generated together, per replica."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per replica. Unset: torch's default."""
    max_restarts: int = Field(default=20, ge=0)
    """How often a replica whose process died is restarted; one more death ends the run."""


CPU_BUCKET_MIB, GPU_BUCKET_MIB = 64, 256
"""engine.sglang.bucket_mib if it is unset: of servers on a CPU, and on GPUs."""
SHARED_FRACTION = 0.6
"""mem_fraction_static, if it is unset, of servers that share GPUs with ranks: for weights and cache."""


class SGLangSection(Section):
    """SGLang servers: how they are started, given requests and weights, and given up."""

    python: ExpandedPath | None = None
    """Python interpreter of an environment with sglang. Unset: the trainer's."""
    urls: Servers = ()
    """Servers that are already running, as http://host:port; the run then starts none."""
    arguments: dict[str, Any] = {}
    """Server arguments under their upstream names, such as mem_fraction_static."""
    env: dict[str, str] = {}
    """Environment variables of the servers."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs (on a CPU: ranks) per server."""
    nodes: int = Field(default=1, ge=1)
    """Parts that each server is split into; each part is on one node and has an equal share of the server's GPUs."""
    sync: SGLangTransport = "distributed"
    """How weights reach the servers. distributed: broadcast (NCCL, or gloo on CPU); shards: each rank sends what it
    holds to the server ranks that need it (SGLang 0.5.23); disk: files in sync_dir, which trainer and servers both see;
    tensor: CUDA IPC from a rank on the server's host; adapters: only the adapters of section lora. If not given,
    adapters is used with lora.rank, provided that the servers can take adapters (docs/lora.md)."""
    shards_over: Literal["tcp", "rdma", "mooncake_tcp"] = "tcp"
    """What carries the bytes with sync shards. tcp: TCP through host memory; rdma: Mooncake's transfer engine, from GPU
    to GPU (needs mooncake-transfer-engine in both environments); mooncake_tcp: Mooncake over TCP, to try it without
    RDMA hardware."""
    fp8_blocks: bool = False
    """Send the layers' matrices as fp8 blocks of 128 x 128 (compute capability 8.9 or 9.0, SGLang 0.5.23)."""
    sync_dir: ExpandedPath | None = None
    """Directory for sync disk, in which each run has a folder of its own. Unset: RUN/sync."""
    bucket_mib: int | None = Field(default=None, ge=1, le=65536)
    """Size of a weight bucket, MiB; the sender holds two. Unset: 64 for servers on a CPU, else 256."""
    verify: bool = True
    """Compare log-probs and checksums after each update."""
    answer_workers: int | None = Field(default=None, ge=1, le=4096)
    """Processes that send requests, parse responses and decode tokens. Unset: one per Ray node."""
    max_tokens_in_flight: int | None = Field(default=None, ge=1)
    """Most tokens, of prompts and expected answers, that one server is given at once. Unset: twice its cache."""
    start_timeout_s: float = Field(default=1800.0, ge=0.01, le=1e6)
    """Time limit for a server to start and generate its first token, seconds."""
    request_timeout_s: float = Field(default=3600.0, ge=0.01, le=1e6)
    """Time limit for the answers of one group, seconds; then the group is requested from another server if one has
    room."""
    stall_timeout_s: float = Field(default=60.0, ge=0.01, le=1e6)
    """Time without a token from a server, even for a probe request, after which it is fenced (gets no more requests and
    is restarted), seconds."""
    sync_timeout_s: float = Field(default=300.0, ge=0.01, le=1e6)
    """Time limit for each call of a weight update and for each broadcast, seconds."""
    max_restarts: int = Field(default=20, ge=0)
    """How often a failed server is restarted."""

    @property
    def named_arguments(self) -> dict[str, Any]:
        """`arguments` with underscores in their names, however they were spelled."""
        return {name.replace("-", "_"): value for name, value in self.arguments.items()}

    @property
    def is_quantized(self) -> bool:
        """Whether servers are quantized."""
        return self.fp8_blocks or self.named_arguments.get("quantization") is not None

    @property
    def transport(self) -> Transport:
        """The facts about `sync`."""
        return TRANSPORTS[self.sync]


class EngineSection(Section):
    """The rollout engine."""

    kind: Annotated[str, OneOf(("embedded", "sglang"))] = "embedded"
    """embedded: transformers in a process of the job; sglang: SGLang servers; module:Class: an engine of your own."""
    options: dict[str, Any] = {}
    """Options of an engine of your own: keyword arguments of its constructor."""
    replicas: int = Field(default=1, ge=1, le=65536)
    """Number of servers, or of processes of the embedded engine, that share the prompts."""
    seed: Seed | None = None
    """Seed of sampling. Unset: trainer.seed."""
    colocate: bool = False
    """Servers and ranks share GPUs and take turns; each offloads its memory meanwhile. Off: each has its own GPUs."""
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
        """Keyword arguments, beside model_path, of the constructor of an engine of one's own."""
        return {"replicas": self.replicas, "seed": filled(self.seed), **self.options}


class RewardSection(Section):
    """The verifier and its worker processes."""

    verifier: Annotated[str, OneOf(("math", "integer", "exact"))] = "math"
    """math: math-verify on the last boxed answer; integer: the last `Answer:` line, as in DAPO; exact: equal text;
    module:Class: a verifier of your own."""
    options: dict[str, Any] = {}
    """Options of this verifier, which checks them; for a verifier of your own, keyword arguments of its constructor."""
    workers: int = Field(default=2, ge=1, le=65536)
    """Worker processes in total; each Ray node has at least one."""
    timeout_s: float = Field(default=5.0, ge=0.01, le=1e5)
    """Time limit per answer, seconds; after that the worker is killed and replaced."""
    memory_mib: int = Field(default=1024, ge=64, le=2**20)
    """Limit on the resident memory of a worker and all processes that it starts, MiB."""
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
    """single_turn: one answer, scored by reward.verifier; agent: a program that calls OpenAI's API; module:function: a
    coroutine that calls it; verifiers:TASKSET: tasks of the package verifiers; module:Class: an environment of your
    own, with several turns."""
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Program and arguments of kind agent; it is run once for each rollout."""
    sandbox: bool = False
    """Run the program of kind agent in a sandbox: it reaches the endpoint and nothing else on the network, and writes
    only to a folder of its own."""
    options: dict[str, Any] = {}
    """For an environment of your own: keyword arguments of its constructor or coroutine; for kind agent: added to the
    problem, as `options`, that the program reads; for kind verifiers: its configuration, without the taskset's name."""
    timeout_s: float = Field(default=300.0, ge=0.01, le=1e6)
    """Time limit of a conversation, seconds; after that it is restarted. The time of the engine, of the verifier and of
    the workers of `step` does not count."""
    workers: int = Field(default=2, ge=1, le=65536)
    """For an environment with `step`: worker processes in total; each Ray node has at least one. For kinds agent and
    verifiers: rollouts that run at once, on the driver's machine."""
    step_timeout_s: float = Field(default=30.0, ge=0.01, le=1e6)
    """Time limit of one `reset` or `step`, seconds; after that its worker is killed and the conversation restarted."""
    memory_mib: int = Field(default=1024, ge=64, le=2**20)
    """Limit on the resident memory of a worker and all processes that it starts, MiB."""
    max_turns: int = Field(default=16, ge=1, le=10000)
    """Most answers of the model in a conversation with an environment with `step`."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one answer in a conversation. Unset: what is left of rollout.max_response_tokens."""
    reward_weights: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = {}
    """Factors of named rewards, by name; if any is given, every name needs one. Empty: all factors are 1."""
    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]+$")] = LOOPBACK
    """Address of the driver's machine on which the endpoint for agents listens; on any other address than loopback
    every request needs a key."""
    strict: bool = False
    """End the run if a conversation with an environment with `step` differs from its history as the chat template
    renders it."""

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
        """How messages name it."""
        return f"environment.kind: {self.kind}"


class NamedEnvironment(EnvironmentSection):
    """One of several environments of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]{0,63}$")]
    """Name of the environment in metrics."""
    sources: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Data sources of its problems. Empty: the source that has the environment's name."""
    weight: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Its share of the training prompts is this weight over the sum of all weights. All environments need one, or none:
    then each has its share of the problems."""

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"environments: {self.name}, kind {self.kind}"


class TrainerSection(Section):
    """The run."""

    run_dir: ExpandedPath | None = None
    """Run directory. Unset: runs/ and the configuration file's name without its suffix."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run; each batch gives minibatches_per_batch * epochs_per_batch of them."""
    seed: Seed = 0
    """Seed of everything random."""
    save_every_steps: int = Field(default=20, ge=0)
    """Steps between checkpoints; 0: only one, at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints that stay on disk."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Besides these, keep for good the first checkpoint at or after each multiple of this many steps; 0: none."""
    export_hf: bool = False
    """Write the model to RUN/hf (bf16 or fp32) after the last step. For a run that is already finished use --resume."""
    export_critic: bool = False
    """Write the critic to RUN/hf_critic in the same way: for transformers, a sequence classifier with one label."""
    export_adapter: bool = False
    """Write the adapters (section lora) to RUN/adapter in the same way, for PEFT, vLLM and SGLang."""
    eval_every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations on data.eval; there is also one before the first step and one after the last. 0: never.
    If the run is stopped, an evaluation is cut off or left out, with a message."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens if a loss or gradient is NaN or infinite. stop: the run ends with exit code 3; skip: the step is
    counted, but changes nothing."""
    deadline_scale: float = Field(default=1.0, ge=1e-3, le=1000)
    """Factor of every deadline in the loop (optimizer step 4 h, collective of the ranks 30 min, ...). The deadlines
    also grow with the time limits of servers, environments and verifiers."""
    minibatches_per_batch: int = Field(default=1, ge=1)
    """Mini-batches that a batch is split into, one optimizer step each. They consist of whole groups, and differ in
    size by at most one group."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """How often each batch is trained on; after the first time its mini-batches are drawn anew, from trainer.seed."""
    replace_lost_ranks: bool = False
    """Replace a rank whose process dies, and go on from a snapshot in host memory, which is taken after each step
    (docs/recovery.md). Off: the run ends; --resume goes on from a checkpoint."""
    snapshot_gib: float | None = Field(default=None, ge=0, le=1e6)
    """Host memory of each node that these snapshots may take, GiB. Unset: half of what is free once the ranks have
    loaded their model."""
    max_replacements: int = Field(default=8, ge=0, le=100_000)
    """Most ranks that are replaced within an hour; one more ends the run."""
    hung_rank_s: float = Field(default=120.0, ge=1, le=86_400)
    """Seconds without any reply and without any use of the CPU after which the process of an embedded engine is killed
    and started again; with replace_lost_ranks this holds for ranks too, which are then replaced."""

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps per batch."""
        return self.minibatches_per_batch * self.epochs_per_batch

    @property
    def hf_dir(self) -> Path:
        """Where the trained model is exported to."""
        return filled(self.run_dir) / "hf"

    @property
    def critic_dir(self) -> Path:
        """Where the trained critic is exported to."""
        return filled(self.run_dir) / "hf_critic"

    @property
    def adapter_dir(self) -> Path:
        """Where the trained adapters are exported to."""
        return filled(self.run_dir) / "adapter"


class ClusterSection(Section):
    """The nodes that the run will get, for checks on a machine that is not one of them; a run that starts asks Ray
    itself."""

    nodes: int = Field(default=1, ge=1)
    """Number of nodes."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs per node. Unset: those of the Ray cluster or of this machine."""
    gpu: Annotated[str, Field(min_length=1)] | None = None
    """Type of GPU as Ray names it, such as H100."""


class WandbSection(Section):
    """Weights & Biases."""

    enabled: bool = False
    """Send metrics to Weights & Biases (needs this package's extra `wandb`)."""
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
    """Write RUN/rollouts (needed for replay, and for samples in the report)."""
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
    """Adapters, trained in place of the weights."""
    engine: EngineSection = EngineSection()
    """The rollout engine."""
    environment: EnvironmentSection = EnvironmentSection()
    """What happens between a prompt and its verdict."""
    environments: tuple[NamedEnvironment, ...] = ()
    """Several environments in place of `environment`, each for the problems of its own data sources."""
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
        """`environments`; if that is empty, `environment`."""
        return self.environments or (self.environment,)

    @property
    def environment_of_source(self) -> dict[str, str]:
        """Data source -> name of its environment; empty if `environments` is."""
        return {source: one.name for one in self.environments for source in one.sources or (one.name,)}
