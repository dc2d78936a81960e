"""Who computes what in the next step. Policy only: nothing here imports torch."""
