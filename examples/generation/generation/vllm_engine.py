"""The engine of the vLLM generator: nobody else imports vLLM."""

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import count
from typing import Any

import zmq
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from generation.engine import Engine, EngineLoad, Piece, Receiver, Request, WeightSource, Within
from generation.errors import GenerationError, RefusedError
from generation.models import build_model, end_tokens, expected_weights, limits_of, read_config
from generation.options import EngineOptions, check_device
from generation.vllm_processes import EngineProcesses
from raycrew.tensor_transport import WeightReceipt, WeightUpdate
from raycrew.tensor_transport.integrations.vllm import BACKEND, VllmWeights, register

GPU_MEMORY_SHARE = 0.3


class VllmEngine(Engine):
    """A vLLM engine that is stepped by its worker; its model is here, or in processes of its own.

    Args:
        options: The engine to be made.
        seed: Of what is sampled without a seed.

    Raises:
        RefusedError: This machine can't do what the options ask for.
    """

    def __init__(self, options: EngineOptions, seed: int) -> None:
        register()
        check_device(options, "cpu" if current_platform.is_cpu() else "accelerator")
        self.options, config = options, read_config(options)
        self.limits, self._ends = limits_of(options, config), end_tokens(options, config)
        self.weights, self.dozes = expected_weights(config), options.sleep_level is not None
        self.adapters: dict[str, LoRARequest] = {}
        self._adapter_numbers = count(1)
        with ExitStack() as until_made:
            folder = options.model
            if isinstance(folder, Mapping):
                folder = until_made.enter_context(tempfile.TemporaryDirectory(prefix="generation-model-"))
                build_model(options, config).save_pretrained(folder)
            self._llm = LLM(model=folder, seed=seed, **_arguments_of(options, self.limits.context_length))
        self._engine = self._llm.llm_engine
        executor = self._engine.engine_core.engine_core.model_executor
        # Now: vLLM lets go of them by itself when one of the processes dies.
        self._sockets = _sockets_of(executor)
        has_processes = options.chosen_executor != "uni"
        self._processes = EngineProcesses(executor, options.answer_timeout_s) if has_processes else None
        # With its process an engine is gone: vLLM would first look through all that is there for garbage.
        if (at_the_end := getattr(self._engine.engine_core, "_finalizer", None)) is not None:
            at_the_end.atexit = False

    def add(self, request: Request) -> None:
        """See `Engine`."""
        sampling = request.sampling
        stops = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._ends)]
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=request.max_tokens,
            stop_token_ids=stops,
            ignore_eos=True,
            seed=request.seed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,  # it is this request's alone
        )
        adapter = None if request.adapter is None else self._adapter(request.adapter)
        prompt = {"prompt_token_ids": list(request.prompt)}
        self._engine.add_request(request.id, prompt, params, lora_request=adapter)

    def step(self) -> Sequence[Piece]:
        """One step of the engine's scheduler."""
        with nullcontext() if self._processes is None else self._processes.needed():
            outputs = self._engine.step()
        return [_piece(output.request_id, output.outputs[0]) for output in outputs]

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine`."""
        self._engine.abort_request(list(request_ids))

    def receiver(self, source: WeightSource, within: Within) -> Receiver:
        """Weights come through vLLM's own interface for them, into each of the engine's processes."""
        weights = VllmWeights(
            self._llm,
            directory=source.directory,
            store=source.store,
            expected=self.weights,
            name=source.name,
            between_steps=within if self.options.packs_ahead and current_platform.is_cpu() else None,
        )
        return _InThread(weights, within)

    def forget_computed(self) -> None:
        """See `Engine`.

        Raises:
            GenerationError: A KV connector has kept some.
        """
        if not self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise GenerationError("the engine's KV connector did not drop what it has")

    def reset_prefix_cache(self) -> None:
        """See `Engine`; while a request runs, vLLM forgets nothing unless what that has is computed anew."""
        self.forget_computed()

    def load(self) -> EngineLoad:
        """What vLLM's scheduler has, which is in this process."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        running, waiting = scheduler.get_request_counts()
        return EngineLoad(running, waiting, scheduler.kv_cache_manager.usage)

    def close(self) -> None:
        """See `Engine`."""
        self._engine.engine_core.shutdown()
        for socket in self._sockets:
            socket.close(linger=0)
        del self._llm, self._engine

    def watch(self, lost: Callable[[str], object]) -> None:
        """See `Engine`."""
        if self._processes is not None:
            self._processes.watch(lost)

    def doze(self) -> None:
        """VLLM's own sleep mode."""
        self._llm.sleep(level=self.options.sleep_level)

    def rouse(self) -> None:
        """The end of it."""
        self._llm.wake_up()

    def explain(self) -> str:
        """See `Engine`."""
        options, executor = self.options, self.options.chosen_executor
        where = (
            "in the worker's own process" if executor == "uni" else f"in processes of its own ({executor})"
        )
        adapters = f"up to {options.max_adapters} adapters" if options.max_adapters else "no adapters"
        asleep = (
            f"to have its processes give up their memory (vLLM's level {options.sleep_level})"
            if self.dozes
            else "to end the engine with its processes, and to wake to make a new one"
        )
        return (
            f"a vLLM engine over {options.tensor_parallel} {current_platform.device_type}, {where}, "
            f"{adapters}; to sleep is {asleep}"
        )

    def load_adapter(self, name: str, path: str) -> None:
        """See `Engine`."""
        if not self.options.max_adapters:
            raise RefusedError(f"adapter {name!r}: this engine was made without adapters (max_adapters=0)")
        if name not in self.adapters and len(self.adapters) == self.options.max_adapters:
            raise RefusedError(f"adapter {name!r}: {len(self.adapters)} are loaded, which is the most")
        number = next(self._adapter_numbers)
        # vLLM's prefix cache knows adapters by name and folder, which may be those of the one before.
        adapter = LoRARequest(f"{name}-{number}", number, path)
        if wrong := [why for why in self._llm.collective_rpc(_add_adapter, args=(adapter,)) if why]:
            self._engine.remove_lora(number)
            raise RefusedError(f"adapter {name!r} is not loaded from {path}: {wrong[0]}")
        before, self.adapters[name] = self.adapters.get(name), adapter
        if before is not None:
            self._engine.remove_lora(before.lora_int_id)

    def unload_adapter(self, name: str) -> None:
        """See `Engine`."""
        self.check_adapter(name)
        self._engine.remove_lora(self.adapters.pop(name).lora_int_id)

    def _adapter(self, name: str) -> LoRARequest:
        self.check_adapter(name)  # it may have been unloaded while the request waited in a pause
        return self.adapters[name]


class _InThread:
    """Has the engine's thread change its weights; what only fetches or asks is done where it is called.

    One call after another: to prepare a version may wait for the engine's thread, which so waits for none.
    """

    def __init__(self, weights: VllmWeights, within: Within) -> None:
        self._weights, self._within = weights, within
        self._turn = threading.Lock()
        self.require = weights.require

    @property
    def version(self) -> int | None:
        return self._weights.version

    @property
    def intact(self) -> bool:
        return self._weights.intact

    def prepare(self, version: int) -> WeightReceipt:
        with self._turn:
            return self._weights.prepare_weights(version)

    def apply(self, update: int | WeightUpdate) -> WeightReceipt:
        with self._turn:
            return self._within(self._weights.apply_weights, update)

    def pull(self, *, missing_ok: bool) -> WeightReceipt | None:
        with self._turn:
            return self._within(partial(self._weights.pull, missing_ok=missing_ok))

    def close(self) -> None:
        with self._turn:
            self._weights.close()


def _sockets_of(executor: Any) -> list[zmq.Socket[Any]]:
    """Of the queues to an engine's processes, which vLLM 0.31 leaves to the garbage collector.

    That may wait for ever in one which has something left to send.
    """
    queues = [getattr(executor, "rpc_broadcast_mq", None), *getattr(executor, "response_mqs", ())]
    held = [vars(queue) for queue in queues if queue is not None]
    held += [vars(condition) for one in held if (condition := one.get("_spin_condition")) is not None]
    return [value for one in held for value in one.values() if isinstance(value, zmq.Socket)]


def _arguments_of(options: EngineOptions, context_length: int) -> dict[str, Any]:
    most, rank = options.max_adapters, options.max_adapter_rank
    adapters: dict[str, Any] = {}
    if most:  # with room for one that is loaded in place of another
        adapters = {"enable_lora": True, "max_loras": most, "max_cpu_loras": most + 1, "max_lora_rank": rank}
    return {
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "max_model_len": context_length,
        "max_num_seqs": options.max_running,
        "tensor_parallel_size": options.tensor_parallel,
        "distributed_executor_backend": options.chosen_executor,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "enable_sleep_mode": options.sleep_level is not None,
        "gpu_memory_utilization": GPU_MEMORY_SHARE,
        "enable_prefix_caching": options.prefix_caching,
        "enforce_eager": True,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,  # its figures of each request cost a tenth of the time of a small model
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        **adapters,
        **options.more,
    }


def _add_adapter(worker: Any, adapter: LoRARequest) -> str | None:
    """Load an adapter in one of the engine's processes; tells why it can't.

    If it raised, what others answer would be taken for the answer to the next question.
    """
    try:
        worker.add_lora(adapter)
    except Exception as error:  # noqa: BLE001 - told
        return f"{type(error).__name__}: {error}"
    return None


def _piece(request_id: str, output: Any) -> Piece:
    tokens = list(output.token_ids)
    logprobs = [at[token].logprob for at, token in zip(output.logprobs or (), tokens, strict=True)]
    return Piece(request_id, tokens, logprobs, output.finish_reason)
