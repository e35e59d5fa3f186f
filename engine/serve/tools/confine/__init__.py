"""What a command of the tools runs under. It imports the standard library alone: `keeper` is a process of its own."""
