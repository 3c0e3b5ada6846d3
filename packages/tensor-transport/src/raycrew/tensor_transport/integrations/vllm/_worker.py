"""The part in each worker of an engine; imported by vLLM alone."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.integrations.vllm import _loading
from raycrew.tensor_transport.integrations.vllm._ahead import Ahead
from raycrew.tensor_transport.integrations.vllm._connectors import check_connectors
from raycrew.tensor_transport.integrations.vllm._outcomes import Outcome, tell
from raycrew.tensor_transport.integrations.vllm._staging import Reader

logger = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where outcomes are told, and what is to be made ready while the engine serves.

    Attributes:
        folder: Where outcomes are told.
        serial: Of what is told; 1 is the first that a client tells, which has the engine from then on.
        told: Where tensors of a version are.
        begins: Whether they are the first ones of that version.
        ends: Whether all have come. If none come, and not all have, what was made ready is forgotten.
    """

    folder: str
    serial: int
    told: dict[str, Any] = field(default_factory=dict)
    begins: bool = False
    ends: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Whose update it is, which, and where its tensors are: nowhere where they were made ready."""

    folder: str = ""
    serial: int = 0
    told: dict[str, Any] = field(default_factory=dict)


class RaycrewWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads what the engine's client has staged. What fails is told, and not raised: see `_outcomes`.

    On a CPU the order in which weights are packed may depend on the number of threads, and all layers of one
    shape read them in that of the first one: all are packed by as many threads as the engine has.

    What is made ready ahead comes by `init_transfer_engine`: vLLM lets that be called whenever no step is
    made, and, unlike an update, does nothing beside it.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._vllm_config = vllm_config
        self._threads = torch.get_num_threads()
        self._reader = Reader()
        self._folder = ""
        self._serial = 0
        self._error: str | None = None
        self._ahead: Ahead | None = None
        self._is_under_way = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """See vLLM's base class."""
        if init_info.serial > 1 and self._is_of_another(init_info):
            return
        self._folder, self._serial, self._error = init_info.folder, init_info.serial, None
        is_expected = init_info.begins or self._is_under_way
        self._is_under_way = False
        if init_info.serial == 1:
            self._try(check_connectors)
        if init_info.told or init_info.ends:
            self._try(lambda: self._make_ready(init_info, is_expected))
        if self._ahead is not None and not self._is_under_way:
            self._ahead.forget()  # Nor are the tensors held that it came by.
        self._tell()

    def start_weight_update(self) -> None:
        """See vLLM's base class."""
        self._error = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See vLLM's base class."""
        if self._is_of_another(update_info):
            return
        self._serial = update_info.serial
        is_ready, self._is_under_way = self._is_under_way, False
        if not update_info.told:
            self._try(lambda: self._exchange(is_ready))
            return
        with _loading.computing_with(self._threads):
            self._try(lambda: _loading.begin(self.model))
            if self._error is None:
                self._try(lambda: self._load(update_info))
            self._try(lambda: _loading.end(self.model, self.model_config))

    def finish_weight_update(self) -> None:
        """See vLLM's base class."""
        self._tell()

    def shutdown(self) -> None:
        """See vLLM's base class."""
        self._reader.close()

    def _is_of_another(self, info: InitInfo | UpdateInfo) -> bool:
        """Whether another client has the engine since, and all in it: this one changes and hears nothing."""
        return info.folder != self._folder

    def _load(self, update_info: UpdateInfo) -> None:
        weights, is_tied = self._reader.read(update_info.told), _loading.is_tied(self.model_config)
        self._ahead = None
        plan = _loading.load(self.model, weights, is_tied=is_tied)
        self._ahead = None if plan is None else Ahead(plan)

    def _make_ready(self, info: InitInfo, is_expected: bool) -> None:
        if self._ahead is None or not is_expected:
            raise WeightUpdateError(
                "this model can't be loaded ahead of an update, or what came before is lost"
            )
        if info.begins:
            self._ahead.forget()
        if info.told:
            with set_current_vllm_config(self._vllm_config), _loading.computing_with(self._threads):
                self._ahead.take(self._reader.read(info.told))
        if info.ends:
            self._ahead.check_whole()
        self._is_under_way = True

    def _exchange(self, is_ready: bool) -> None:
        if self._ahead is None or not is_ready:
            raise WeightUpdateError("nothing was made ready")
        self._ahead.exchange(self.model_config.dtype)

    def _try(self, what: Callable[[], None]) -> None:
        """The first thing that goes wrong is told; the others of the update still have to be tried."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 - told, see the class
            self._error = self._error or f"{type(error).__name__}: {error}"

    def _tell(self) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        members = parallel.world_size * parallel.data_parallel_size
        try:
            tell(self._folder, Outcome(self._serial, rank, members, os.getpid(), self._error))
        except OSError:  # The client misses what this rank says, and takes it for a failure.
            logger.exception("rank %d cannot say what became of update %d", rank, self._serial)
