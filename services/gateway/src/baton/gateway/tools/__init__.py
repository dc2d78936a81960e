"""Tools that a client offers to the model, and the calls that it makes of them."""
