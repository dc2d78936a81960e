"""Who is in the fleet: named on the command line, added by an operator, registered over gRPC, or found in etcd."""
