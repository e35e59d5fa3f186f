"""What clients of a server may call: built-in tools, and tools of MCP servers. All of it is off by default."""
