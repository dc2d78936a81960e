"""How a worker makes itself known: to gateways over gRPC, or in etcd."""
