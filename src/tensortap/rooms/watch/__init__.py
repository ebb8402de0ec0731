"""Watch: tensors in a worker process, and films of them."""
