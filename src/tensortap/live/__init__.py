"""The live connection: messages, keys, server, history, and the sink that sends."""
