"""Commands: one file per command, each calling a public function."""
