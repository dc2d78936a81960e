"""One rank of a tensor-parallel group as a process of its own: rank, size, meeting file, output file, model folders."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from engine_forward import forward_of, prompts

from baton.engine import load_model_config
from baton.engine.linear import Tuning
from baton.engine.models.collective import BackendGroup
from baton.engine.models.llama import LlamaModel
from baton.engine.shard import shard_config
from baton.engine.types import Extent
from baton.engine.weights import WeightReader

EXTENTS = [Extent(9, 10), Extent(2, 6)]
CHUNKS = [30, 1, 1, 28]


def main(rank: int, size: int, meeting: str, output: str, folders: list[str]) -> None:
    torch.set_num_threads(1)
    group = BackendGroup(dist.ProcessGroupGloo(dist.FileStore(meeting, size), rank, size, timedelta(seconds=60)))
    results = {}
    for folder in folders:
        config = load_model_config(folder)
        told = []
        with torch.inference_mode(), WeightReader(folder, torch.float32, lambda done, _, told=told: told.append(done)) as reader:
            model = LlamaModel(config, reader, torch.float32, Tuning.FEW_ROWS, group)
        logits, pool = forward_of(model, shard_config(config, size), prompts([60])[0], EXTENTS, CHUNKS)
        results[folder] = {"logits": logits, "planes": pool.planes, "num_bytes_read": told[-1]}
    torch.save(results, output)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), str(Path(sys.argv[3]).resolve()), sys.argv[4], sys.argv[5:])
