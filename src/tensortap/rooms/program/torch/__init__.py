"""Facts about the steps of torch programs."""
