"""The part in each worker of an engine; imported by vLLM alone."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from raycrew.tensor_transport.integrations.vllm import _loading
from raycrew.tensor_transport.integrations.vllm._outcomes import Outcome, tell
from raycrew.tensor_transport.integrations.vllm._staging import Reader

logger = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where outcomes are told."""

    folder: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which update it is, and where its tensors are."""

    serial: int = 0
    told: dict[str, Any] = field(default_factory=dict)


class RaycrewWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads what the engine's client has staged. What fails is told, and not raised: see `_outcomes`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader = Reader()
        self._folder = ""
        self._serial = 0
        self._error: str | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """See vLLM's base class."""
        self._folder, self._serial, self._error = init_info.folder, 0, None
        self._tell()

    def start_weight_update(self) -> None:
        """See vLLM's base class."""
        self._error = None
        self._try(lambda: _loading.begin(self.model))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See vLLM's base class."""
        self._serial = update_info.serial
        if self._error is None:
            self._try(lambda: self._load(update_info))

    def finish_weight_update(self) -> None:
        """See vLLM's base class."""
        self._try(lambda: _loading.end(self.model, self.model_config))
        self._tell()

    def shutdown(self) -> None:
        """See vLLM's base class."""
        self._reader.close()

    def _load(self, update_info: UpdateInfo) -> None:
        weights, is_tied = self._reader.read(update_info.told), _loading.is_tied(self.model_config)
        _loading.load(self.model, weights, is_tied=is_tied)

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
