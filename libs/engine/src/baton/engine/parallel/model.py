"""A model in parts, one a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from baton.engine.device.model import DeviceModel
from baton.engine.errors import RankFailedError
from baton.engine.model_config import ModelConfig
from baton.engine.models.collective import Collective
from baton.engine.models.llama import LlamaModel
from baton.engine.parallel.groups import GroupMaker, group_maker
from baton.engine.parallel.ranks import ABORT_S, Ranks


class ShardedModel:
    """Owns the ranks' threads, their groups and their shards; close it when its engine has stopped.

    load(rank, group, device) reads one rank's shard, on that rank's thread. `config` is that of the whole model, `device` that of rank 0.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        load: Callable[[int, Collective, torch.device], LlamaModel | DeviceModel],
        *,
        deterministic: bool = False,
        make_group: GroupMaker | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.devices = tuple(devices)
        self.groups: list[Collective] = []
        self._releases: list[Callable[[], None]] = []
        make_group = make_group or group_maker(devices, deterministic=deterministic)
        self.ranks = Ranks(devices, self._abort)
        try:
            self.groups = self.ranks.run(make_group)
            self.shards = self.ranks.run(lambda rank: load(rank, self.groups[rank], self.devices[rank]))
        except BaseException as error:
            self.close()
            if isinstance(error, RankFailedError) and error.__cause__ is not None:
                raise error.__cause__ from None  # what is wrong with the folder or a device is no rank's own fault
            raise

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def degree(self) -> int:
        return len(self.devices)

    def share_cores(self, num_threads: int | None) -> None:
        """On a CPU: divides the threads of torch's arithmetic (None: as many as it has now) among the ranks."""
        if self.device.type == "cpu":
            each = max(1, (num_threads or torch.get_num_threads()) // self.degree)
            self.ranks.run(lambda rank: torch.set_num_threads(each))

    def on_close(self, release: Callable[[], None]) -> None:
        """`release` lets go of what was captured with the groups' collectives in it: a group on GPUs does not end while that lives."""
        self._releases.append(release)

    def close(self) -> None:
        """Idempotent."""
        self.ranks.close()
        while self._releases:
            self._releases.pop()()
        self._abort()

    def _abort(self) -> None:
        """On threads of their own: ending a group may wait for a device that will never answer."""
        threads = [threading.Thread(target=group.abort, name="end of a group", daemon=True) for group in self.groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORT_S)
