"""The command line: one file a command, each calling what the library offers."""
