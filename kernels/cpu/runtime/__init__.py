"""The thread team, compiled kernels and their store on disk, and stages of a compiled step."""
