"""Tensor parallelism inside one process: a thread for each rank, with its shard of the model, its part of the pool and its runner."""
