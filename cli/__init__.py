"""The `engine` command: one file a command, each parses its flags, calls the library and prints."""
