"""The machine and the process: cores, memory, files, logs, signals."""
