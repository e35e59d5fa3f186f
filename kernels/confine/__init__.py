"""What a command of the tools, and a process that decodes hostile files, run under. It imports the standard library
alone: `keeper` is a process of its own."""
