"""The engine on a GPU. Every file here also runs on CPU tensors, through the kernels' plain twins: that is how it is tested without one."""
