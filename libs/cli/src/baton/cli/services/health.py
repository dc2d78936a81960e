"""Asking a service whether it is serving, by the standard health protocol."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

CHECK_TIMEOUT_S = 2.0


def is_serving(address: str) -> bool:
    """What grpc.health.v1 says of the whole server; False also while nobody listens."""
    with grpc.insecure_channel(address) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=CHECK_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
