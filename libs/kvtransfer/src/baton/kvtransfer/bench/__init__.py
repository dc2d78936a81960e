"""Speed beside UCX's own benchmark program and beside NIXL: `python -m baton.kvtransfer.bench`."""
