"""Trainer that runs a user's script as a rank of a generation.

Every generation runs the script from its beginning. `attach` restores the state of its model and optimizer, and `steps`
yields the remaining steps. The state is committed between two steps.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.data.loader.sampler import derive_key
from raytrain_hpc.data.samples.sample_reader import restore_generators, seed_generators
from raytrain_hpc.distributed.abort import CollectiveAbort
from raytrain_hpc.distributed.handshake import PeerInfo, exchange_peer_info
from raytrain_hpc.distributed.process_groups import GenerationAbortedError, ParallelContext, init_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.elastic.state_partition import compute_state_partition
from raytrain_hpc.errors import ModelError, RaytrainError, RunFailedError
from raytrain_hpc.optim.optimizer import get_local_slices
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.phase_durations import PhaseDurations
from raytrain_hpc.runtime.script_context import CURRENT_RANK
from raytrain_hpc.runtime.worker_spec import Script, WorkerSpec
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.state.keyed_rng import derive_seed
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.storage.location import parse_location
from raytrain_hpc.training.callback_builder import add_common_callbacks, build_callback_list
from raytrain_hpc.training.callback_state import CallbackState
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.loss_reduction import all_reduce
from raytrain_hpc.training.sample_loader import move_content
from raytrain_hpc.training.script_backward import ScriptBackward, ScriptLoss
from raytrain_hpc.training.script_batches import ScriptBatches
from raytrain_hpc.training.script_completion import ScriptCompletion, ScriptProgress
from raytrain_hpc.training.script_models import ScriptModels
from raytrain_hpc.training.script_random import ScriptGenerators
from raytrain_hpc.training.script_state import ScriptState
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.snapshot_peers import SnapshotPeers
from raytrain_hpc.training.state_loader import get_source_state, restore_state
from raytrain_hpc.training.step_completion import TrainOutcome
from raytrain_hpc.training.weight_exchange import WeightExchange

_RUN_ERRORS = (RaytrainError, GenerationAbortedError)  # and not those of the script's own code


class _ScriptExit(BaseException):
    """Control flow that ends the script early. Not an Exception, so that `except Exception` does not catch it."""


class ScriptTrainer:
    """One rank of a run that trains a user's script."""

    def __init__(
        self,
        spec: WorkerSpec,
        rank: int,
        device: torch.device,
        rendezvous: Rendezvous | None,
        control: ControlChannel,
        snapshot_store: SnapshotStore | None,
    ):
        self.device = device
        self._spec, self._config, self._control, self._snapshot_store = spec, spec.config, control, snapshot_store
        self._durations = PhaseDurations()
        self.context: ParallelContext = init_process_groups(
            rendezvous, rank, spec.layout, device, arm_abort=control.arm_abort
        )
        control.arm_abort(CollectiveAbort({}))  # those of devices; sockets of others are not known yet
        self._callbacks = build_callback_list(spec, self.context, control)
        self._callbacks.keeps_generators = True  # the script draws from the same ones
        self._is_elastic = spec.config.train.deterministic == "elastic"
        self._batches = ScriptBatches(spec.layout, rank, spec.batching, is_elastic=self._is_elastic)
        self._outcome: TrainOutcome | None = None
        self._step: int | None = None
        self._error: Exception | None = None
        self._is_attached = self.has_started = False
        self._num_batches_read = 0  # in this step
        self._exit_stack = ExitStack()  # of what `attach` opens
        self._durations.end("communicator")

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.context.layout.world_size

    def run(self, start_step: int, end_step: int) -> TrainOutcome:
        """Run the script. Raises its errors, and RunFailedError if it ends without finishing `steps`."""
        with self._callbacks.close_on_exit(), self._exit_stack:
            return self._run_script()

    def _run_script(self) -> TrainOutcome:
        script = self._spec.custom
        if not isinstance(script, Script):
            raise TypeError("ScriptTrainer needs a WorkerSpec whose `custom` is a Script")
        token, argv_and_path = CURRENT_RANK.set(self), (sys.argv, sys.path)
        sys.argv, sys.path = [script.path, *script.arguments], [str(Path(script.path).parent), *sys.path]
        seed_generators(derive_seed(self._config.run.seed, "script"))  # a script need not seed them
        try:
            runpy.run_path(script.path, run_name="__main__")
        except _ScriptExit:
            if self._error is not None:
                raise self._error from None
        except SystemExit as system_exit:  # Ray would take it as a request to end the actor
            if system_exit.code not in (None, 0):
                raise RunFailedError(f"{script.path} ended with exit code {system_exit.code}") from system_exit
        finally:
            sys.argv, sys.path = argv_and_path
            CURRENT_RANK.reset(token)
        if self._outcome is None and self._step == self._spec.end_step - 1 and self._backward.totals is not None:
            self._completion.commit(self._step + 1)  # the script has left its loop in the last step
            self._outcome = "done"
        if self._outcome is None:
            raise RunFailedError(f"{script.path} ended at step {self._step}, before run.steps() was exhausted")
        self._control.set_phase("saving")
        self._checkpointer.finish()
        return self._outcome

    def attach(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        objects: Mapping[str, Any],
        plan: Mapping[str, str] | None,
    ) -> None:
        """Take over the state of models, optimizers and objects, and restore it. Raises ModelError on a second call."""
        if self._is_attached:
            raise ModelError("attach: called twice; pass several models and optimizers as dicts to one call")
        self._is_attached = True
        spec, config, context = self._spec, self._config, self.context
        self._models = ScriptModels(models, optimizers, plan, config, context, spec.batching)
        progress = ScriptProgress()
        self._script_state = ScriptState(models, optimizers, {**objects, "script progress": progress})
        self._generators = ScriptGenerators(config.run.seed, context, is_elastic=self._is_elastic)
        for module in models.values():
            self._generators.isolate_forward(module)
        callback_state = self._start_callbacks(models)
        state = self._script_state.to_sharded_state(self._generators.state, callback_state.list_shards())
        peers, peer_info, store = self._restore_state(state, callback_state)
        replica_check = ReplicaCheck(state, context, callback_state.list_replicated())
        replica_check.compare()
        self._snapshots = self._build_snapshots(state, peers, peer_info)
        self._exit_stack.enter_context(self._snapshots.close_on_exit())
        indexes, emit = peer_info.destination_indexes, self._control.emit
        self._checkpointer = Checkpointer(state, indexes, context, store, spec, emit)
        script_loss = ScriptLoss()
        self._backward = self._build_backward(script_loss)
        checks = replica_check, self._snapshots.mark_verified
        add_common_callbacks(self._callbacks, spec, script_loss, state, *checks, self._control, context.tracer)
        self._completion = self._build_completion(state, callback_state, progress)
        for optimizer in optimizers.values():
            optimizer.register_step_pre_hook(lambda *arguments: self._before_update())
        self._control.arm_abort(CollectiveAbort(peer_info.peer_sockets))
        self._durations.end("state")  # and of what the script does before it
        self._control.emit(self._durations.to_ready_record(context.rank))

    def _start_callbacks(self, models: Mapping[str, nn.Module]) -> CallbackState:
        """Give the models to the callbacks, start their generation, and return their state, not restored yet."""
        context, whole_model = self._callbacks.context, self._models.whole_model
        context.modules = dict(enumerate(models.values()))
        context.parameters = get_local_slices(whole_model.trainable_parameters)
        context.get_gradients = self._models.get_gradients
        self._callbacks.run("on_generation_start")
        return CallbackState(self._callbacks.user, self._callbacks.dropped, whole_model)

    def _restore_state(
        self, state: ShardedState, callback_state: CallbackState
    ) -> tuple[SnapshotPeers, PeerInfo, CheckpointStore]:
        """Fill the state, and return the peers of its snapshots, the indexes of all ranks, and the checkpoints."""
        spec, context = self._spec, self.context
        source_state = get_source_state(spec, context.rank, self._snapshot_store)
        index = state.to_index()
        peers = SnapshotPeers(spec, context.rank, self._snapshot_store, self.device, index)
        peer_info = exchange_peer_info(index, source_state.to_index(), context, peers.handles)
        store = CheckpointStore(parse_location(self._config.run.dir) / "checkpoints")
        peer_info = callback_state.agree_on_sources(source_state, peer_info, context.world_group)
        restore_state(spec, context, state, source_state, peer_info, store)
        self._models.connect(peer_info.destination_indexes)
        if spec.start_step:
            self._script_state.restore(context.world_group, self.device)
        self._generators.sync_state()  # a fault can come between the capture of a step and the agreement
        callback_state.sync(context.world_group, self.device)
        callback_state.restore()
        return peers, peer_info, store

    def _build_backward(self, script_loss: ScriptLoss) -> ScriptBackward:
        return ScriptBackward(
            self.context,
            self._models,
            self._batches,
            self._generators,
            self._callbacks,
            self._snapshots,
            self._checkpointer,
            self._control,
            script_loss,
            self._is_elastic,
        )

    def _build_completion(
        self, state: ShardedState, callback_state: CallbackState, progress: ScriptProgress
    ) -> ScriptCompletion:
        context, model = self._callbacks.context, self._models.whole_model
        exchange = WeightExchange(context, model, state, callback_state, self._snapshots, self._checkpointer)
        context.exchange_weights = exchange
        return ScriptCompletion(
            self._spec,
            self.context,
            self._backward,
            self._script_state,
            self._generators,
            self._snapshots,
            self._checkpointer,
            self._callbacks,
            callback_state,
            exchange,
            progress,
            self._control,
        )

    def _before_update(self) -> None:
        self._backward.check_complete()
        with self._exit_on_error():
            self._completion.before_update()

    def _build_snapshots(self, state: ShardedState, peers: SnapshotPeers, peer_info: PeerInfo) -> SnapshotManager:
        spec = self._spec
        suffices = max(compute_state_partition(spec.layout)) == 0 and not self._models.running_statistics.buffers
        replicator = peers.create_replicator(peer_info)
        snapshots = SnapshotManager(self._config, self._snapshot_store, state, suffices, replicator, lambda: None)
        attached = peers.attach_snapshots(peer_info, self._control.log)
        snapshots.begin_generation(spec.start_step, spec.generation, peers.own_snapshots, attached, peers.replicas)
        peers.publish(self._control)
        return snapshots

    def add_object(self, name: str, item: Any) -> None:
        """Make the state of an object that the script creates after `attach` part of the run's, and restore it."""
        self._script_state.add_object(name, item, is_resumed=self._spec.start_step > 0)

    def steps(self, count: int | None) -> Iterator[int]:
        """Yield the remaining steps; see `script.ScriptRun.steps`."""
        spec = self._spec
        if not self._is_attached:
            raise ModelError("steps: attach a model and an optimizer first")
        if count is not None and count != spec.config.train.steps:
            raise ModelError(f"steps({count}): the run has train.steps={spec.config.train.steps}; make them the same")
        if self.has_started:
            raise ModelError("steps: called twice; a run has one training loop")
        self.has_started = True
        self._generators.restore()
        self._generators.capture()
        self._generators.sync()
        self._outcome = self._completion.begin()
        for step in range(spec.start_step, spec.end_step) if self._outcome is None else ():
            self._step = step
            self._backward.begin_step(step)
            self._control.set_phase("evaluating")  # code outside of `backward` may take minutes
            self._generators.begin_step(step)
            self._num_batches_read = 0
            yield step
            self._backward.check_complete()
            if self._backward.totals is None:
                raise ModelError(f"step {step}: backward was not called; call run.backward(loss), not loss.backward()")
            self._outcome = self._completion.commit(step + 1)
            if self._outcome in ("stopped", "paused"):
                raise _ScriptExit
            if self._outcome == "done":
                break
        self._step, is_ended = None, self._outcome == "done"
        self._outcome = "done"
        if spec.end_step < spec.config.train.steps and not is_ended:  # what follows the loop must not be run
            raise _ScriptExit
        self._control.set_phase("idle")  # code after the loop has no time limit

    def get_local_rows(self, num_rows: int) -> range:
        """Return the rows of a batch that this rank computes. Raises ModelError if it cannot be divided."""
        return self._batches.take_rows(num_rows)

    def begin_draw(self) -> tuple[int, int]:
        """Return what tells the next batch from others: its step, and its number among those drawn in the step."""
        self._num_batches_read += 1
        return self._step or 0, self._num_batches_read

    @contextmanager
    def seed_rows(self, draw: tuple[int, int]) -> Iterator[Callable[[int], None]]:
        """Yield a function that seeds the generators for a row of the batch `draw`; restore them at the end.

        A single rank draws from the shared generators, as the script does without a run, unless it must draw as
        several ranks do (train.deterministic=elastic).
        """
        if self.context.layout.world_size == 1 and not self._is_elastic:
            yield lambda row: None
            return
        key = (self._config.run.seed, "script rows", *draw)
        with restore_generators():
            yield lambda row: seed_generators(derive_key(*key, row))

    def move_to_device(self, batch: Any) -> Any:
        """Return a batch of nested tensors on this rank's device."""
        return move_content(batch, self.device)

    def backward(self, loss: Tensor) -> Tensor:
        """Compute gradients of the mean loss over all ranks; see `script.ScriptRun.backward`.

        An error ends the script, so that the run can recover.
        """
        self._check_started("backward")
        with self._exit_on_error(), self._completion.report_on_error():
            mean_loss = self._backward.run(loss)
        self._completion.report()
        return mean_loss

    def iter_microbatches(self, num_local_rows: int) -> Iterator[slice]:
        """Yield the rows of this rank's microbatches; see `script.ScriptRun.microbatches`. Errors as in `backward`."""
        self._check_started("microbatches")
        rows = self._backward.iter_microbatches(num_local_rows)
        while True:
            with self._exit_on_error(), self._completion.report_on_error():
                current = next(rows, None)
            if current is None:
                self._completion.report()
                return
            yield current

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip gradients by their norm over all ranks; see `script.ScriptRun.clip_grad_norm_`."""
        self._check_started("clip_grad_norm_")
        with self._exit_on_error():
            return self._models.clip_grad_norm(parameters, max_norm)

    @property
    def loss(self) -> float:
        """Loss of the step so far; 0 before the first pass of a step is complete."""
        totals = self._backward.totals if self._is_attached else None
        return 0.0 if totals is None else totals.loss

    def _check_started(self, name: str) -> None:
        """Raise ModelError outside of the steps."""
        if self._step is None:
            raise ModelError(f"{name}: called outside of the steps of run.steps()")

    @contextmanager
    def _exit_on_error(self, kinds: type[Exception] | tuple[type[Exception], ...] = Exception) -> Iterator[None]:
        """End the script on an error, which it must not catch. Mistakes in the script are raised in it."""
        try:
            yield
        except ModelError:
            raise
        except kinds as error:
            self._error = error
            raise _ScriptExit from error

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the record of this step; see `script.ScriptRun.log`."""
        self._check_started("log")
        self._completion.log(metrics)

    def save(self) -> None:
        """Request a checkpoint of this step."""
        self._completion.request_save()

    @contextmanager
    def evaluation(self) -> Iterator[dict[str, float]]:
        """Call the hooks around an evaluation; yield the dict that takes its metrics. Allowed after the steps too."""
        if not self.has_started:
            self._check_started("evaluate")
        with self._exit_on_error(_RUN_ERRORS), self._completion.evaluation() as metrics:
            yield metrics
        if self._step is None:
            self._control.set_phase("idle")

    def count_progress(self) -> None:
        """Tell the watchdog that an evaluation makes progress."""
        self._control.set_phase("evaluating")

    def all_reduce(self, values: Tensor) -> None:
        """Sum values over all ranks, in place."""
        with self._exit_on_error():
            all_reduce(values, self.context)
            if self._control.is_aborted:
                raise GenerationAbortedError("collectives were aborted")
