"""Several gateway processes on one pair of ports (`--processes`)."""
