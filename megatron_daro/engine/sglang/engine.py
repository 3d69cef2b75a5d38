"""SGLang servers as one rollout engine: what the loop and the weight sync see of them.

Rollouts: generation.py. Servers: supervision.py, and memory.py if the trainer shares their GPUs. Weights: update.py.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.sections import SGLangSection
from megatron_daro.deadlines import first_cause
from megatron_daro.engine.sglang import fp8_blocks
from megatron_daro.engine.sglang.adapters import Adapters
from megatron_daro.engine.sglang.asking import Asker
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.engine.sglang.generation import ServerGeneration
from megatron_daro.engine.sglang.memory import SharedMemory
from megatron_daro.engine.sglang.probe import probe_call, probe_rollouts
from megatron_daro.engine.sglang.receiving import RECEIVING, ServersEnd
from megatron_daro.engine.sglang.servers import ServerHandle
from megatron_daro.engine.sglang.supervision import Supervision
from megatron_daro.engine.sglang.update import ServerUpdate, UpdateParts
from megatron_daro.engine.sglang.vetting import Expected
from megatron_daro.errors import EngineError
from megatron_daro.sync.check import ProbeAnswer
from megatron_daro.sync.shard_layouts import ServerLayout, server_layout
from megatron_daro.types import GroupRequest, Rollout


def layout_of_servers(options: SGLangSection, model_path: Path) -> ServerLayout:
    """Return how each server lays the model out on its ranks. Raises ModelError: this is not known."""
    arguments = {**options.named_arguments, "tp_size": options.tensor_parallel}
    return server_layout(read_model_shape(model_path), arguments)


def _name_of(run_dir: Path) -> str:
    """Return a name that differs from other runs' but is the same when this run is resumed."""
    run_dir = run_dir.resolve()
    return f"{run_dir.name}-{zlib.crc32(os.fsencode(run_dir)):08x}"


class SGLangEngine:
    """A fleet of SGLang servers."""

    def __init__(
        self,
        handles: Mapping[str, ServerHandle],
        options: SGLangSection,
        expected: Expected,
        *,
        asker: Asker,
        warn: Callable[[str], None],
        loads: Callable[[str], None] = lambda text: None,
        run_dir: Path,
        seed: int,
        temperature: float,
        probe_tokens: Sequence[int],
    ) -> None:
        """Start nothing.

        Args:
            handles: where servers come from, by name. options: the configuration's engine.sglang.
            expected: what every server must be.
            asker: asks servers; started and closed with this. warn: shows the user a warning.
            run_dir: for logs and weight files. seed: of sampling.
            temperature: at which the policy's log-probs are computed.
            probe_tokens: given text of the check after each weight update.

        Raises:
            ModelError: `sync: shards`, but the layout of the servers' weights is not known.
        """
        self._handles, self._options, self._expected, self._asker = handles, options, expected, asker
        self._temperature, self._probe_tokens = temperature, tuple(probe_tokens)
        awaited = 0 if expected.shares_gpus else options.max_restarts
        self.fleet = Fleet(
            [Server(name, awaited_restarts=awaited if one.restartable else 0) for name, one in handles.items()],
            max_tokens_in_flight=options.max_tokens_in_flight,
            on_fenced=self._given_up,
        )
        self._supervision = Supervision(self.fleet, handles, options, expected, warn=warn, loads=loads, join=self._join)
        self._adapters = Adapters(options.sync_timeout_s)
        self._generation = ServerGeneration(
            self.fleet,
            self._supervision,
            asker,
            options,
            self._adapters,
            seed=seed,
            vocabulary=expected.vocabulary,
            warn=warn,
        )
        self._end = ServersEnd(
            options=options,
            fp8_blocks=fp8_blocks.fp8_matrices(expected.model_type) if options.fp8_blocks else (),
            layout=layout_of_servers(options, expected.model_path) if options.transport.shard_plan else None,
            sync_dir=options.sync_dir / _name_of(run_dir) if options.sync_dir else run_dir / "sync",
            adapter=expected.adapter,
            new_name=self._generation.new_name,
        )
        self._updates = UpdateParts(
            fleet=self.fleet,
            options=options,
            receiving=partial(RECEIVING[options.sync], self._end),
            probe=self._probe,
            death_of=self._supervision.death_of,
            adapters=self._adapters,
            metrics=self.metrics,
            warn=warn,
        )
        self._memory = SharedMemory(self.fleet, self._supervision, options)
        self._when_back: Callable[[str], Awaitable[None]] | None = None
        self._started = False

    async def start(self) -> None:
        """Start the servers, unless they are started. Raises EngineError with what is wrong, after ending them."""
        if self._started:
            return
        try:
            async with asyncio.TaskGroup() as starting:
                starting.create_task(self._asker.start())
                starting.create_task(self._supervision.start())
        except BaseException as error:
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise first_cause(error) from None
            raise
        self._started = True

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of each request as soon as all of them ended; closing the iterator aborts the rest."""
        self._check_usable()
        return self._generation.generate(requests)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all); `generate` yields them with the tokens they have."""
        await self._generation.abort(group_ids)

    def begin_update(self, version: int, only: str | None = None) -> ServerUpdate | None:
        """Take servers out of service for an update: all that serve or are joining, or, with `only`, the server of this
        name. Returns None if that one is no longer joining. If there is no server, the update of all waits for the
        first that comes back.

        Raises:
            EngineError: all servers are gone, or the engine is not running.
        """
        self._check_usable()
        if only is None:
            servers = self.fleet.of("serving", "joining")
        else:
            servers = [server for server in self.fleet.of("joining") if server.name == only]
            if not servers:
                return None
        update = ServerUpdate(self._updates, servers, version, awaits_others=only is None)
        update.begin()
        return update

    def serve_as_loaded(self) -> None:
        """Let servers serve with the weights that they were started with, now and whenever one comes back. For use
        without a policy."""

        async def serve(name: str) -> None:
            for server in self.fleet.of("joining"):
                if server.name == name:
                    self.fleet.serve(server, None)

        self.when_back(serve)
        for server in self.fleet.of("joining"):
            self.fleet.serve(server, None)

    def when_back(self, call: Callable[[str], Awaitable[None]]) -> None:
        """Call `call` with the name of each server that comes back, unless servers share the trainer's GPUs."""
        self._when_back = call

    def metrics(self) -> dict[str, float]:
        """Return `engine/*`: serving servers; since the start fenced servers, restarts, retries and restarts of answer
        workers."""
        return {
            "engine/servers": float(len(self.fleet.of("serving"))),
            "engine/fenced": float(self.fleet.fenced_count),
            "engine/restarts": float(sum(server.restarts for server in self.fleet.servers)),
            "engine/retries": float(self._generation.retries),
            "engine/answer_worker_restarts": float(self._asker.restarts),
        }

    async def release_memory(self) -> None:
        """Give the GPUs to the trainer; no request may be in flight. The next weight update takes the memory again.

        Raises:
            EngineError: no server is left, or the engine is not running.
        """
        self._check_usable()
        await self._memory.release()

    def allow_starts(self) -> None:
        """Restart servers that died in the trainer's turn, now that it has left the GPUs."""
        self._supervision.allow_starts()

    async def fatal_error(self) -> EngineError:
        """Wait until all servers are gone or their supervision failed; return why the run ends."""
        return await self.fleet.fatal_error()

    async def close(self) -> None:
        """End all requests, and the servers that this run started. May be called twice."""
        self.fleet.close("the SGLang engine was closed")
        self._generation.close()
        await self._adapters.close(s for s in self.fleet.servers if not self._handles[s.name].restartable)
        await self._supervision.close()
        await self._asker.close()
        await asyncio.to_thread(shutil.rmtree, self._end.sync_dir, ignore_errors=True)
        self._started = False

    def _given_up(self, server: Server) -> None:
        if not self._handles[server.name].restartable:  # its process may live on
            self._adapters.unload_all(server)
        self._supervision.restart(server)

    async def _join(self, server: Server) -> None:
        """Ask for the weights for a server that came back (before the first update of all, WeightSync leaves them to
        that one). A server that shares the trainer's GPUs waits for the next update of all: in the servers' turn the
        trainer's weights are on the host."""
        if self._when_back and not self._expected.shares_gpus:
            await self._when_back(server.name)

    def _check_usable(self) -> None:
        if not self._started:
            raise EngineError("the SGLang engine is not running: it was not started, or it was closed")
        self.fleet.check()

    async def _probe(self, server: Server, verified: bool) -> ProbeAnswer:
        """Send the probe to a server that does not serve yet; return its answer."""
        name = f"{self._generation.new_name()}-probe"
        request, body = probe_call(self._probe_tokens, name, temperature=self._temperature, adapter=server.adapter)
        answers = await server.client.post("/generate", body, timeout_s=self._options.sync_timeout_s)
        fixed, sampled, base = probe_rollouts(request, self._probe_tokens, answers, self._expected.vocabulary)
        dtype = server.facts.dtype if server.facts else ""
        return ProbeAnswer(fixed, sampled, self._temperature, dtype, verified, base)
